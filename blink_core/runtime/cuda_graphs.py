"""Captures a step graph for every bucket and instantiates it for launch from the host or from the device [design 6]."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cupy as cp
import numpy as np
from cuda.bindings import driver

from blink_core.ops.cuda_capture import captured
from blink_core.ops.cuda_modules import check
from blink_core.runtime.cuda_step import Bucket, CudaStep, NoopStep

log = logging.getLogger("blink.cuda")


def instantiate(graph: Any, stream: cp.cuda.Stream, *, device: bool) -> Any:
    """A CUgraphExec, uploaded. Raises CudaError."""
    flags = int(driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) if device else 0
    executable = check(driver.cuGraphInstantiate(driver.CUgraph(int(graph.graph)), flags), "cuGraphInstantiate")
    check(driver.cuGraphUpload(executable, driver.CUstream(stream.ptr)), "cuGraphUpload")
    stream.synchronize()
    return executable


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A bucket and its executables, used in turn; ``tail``: launched by tail launch."""

    bucket: Bucket
    executables: tuple[Any, ...]
    tail: bool


class StepGraphs:
    """All graphs of an engine. The graphs and their stream live as long as this object."""

    def __init__(
        self,
        step: CudaStep | NoopStep,
        buckets: list[Bucket],
        *,
        device: bool,
        tail: Callable[[Bucket], bool] = lambda bucket: False,
        turns: int = 2,
        apart: bool = True,
    ) -> None:
        """Runs every bucket once on the empty plan, which loads every kernel, and then captures it.

        turns: executables of a bucket that is launched fire-and-forget: one that has told its end may not be free yet.
        apart: a graph for each bucket; without it they only run here, and :meth:`work` says what to capture elsewhere.
        """
        self._step = step
        self.stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        self._kept: list[Any] = []
        self.graphs: list[StepGraph] = []
        for bucket in buckets:
            with self.stream:
                step.run(bucket, resident=device and not tail(bucket))
        self.stream.synchronize()
        for bucket in buckets:
            resident = device and not tail(bucket)
            if not apart:
                self.graphs.append(StepGraph(bucket, (), True))
                continue
            graph = captured(self.stream, partial(step.run, bucket, resident=resident))
            self._kept.append(graph)
            count = turns if resident else 1
            executables = tuple(instantiate(graph, self.stream, device=device) for _ in range(count))
            self.graphs.append(StepGraph(bucket, executables, device and tail(bucket)))
        log.info("%d step graphs, %d executables", len(self.graphs), self.executables)

    def work(self, graph: StepGraph) -> Callable[[], None]:
        """What launches the step of a bucket on the current stream, where all of the GPU is its own."""
        return partial(self._step.run, graph.bucket, resident=False)

    @property
    def executables(self) -> int:
        return sum(len(g.executables) for g in self.graphs)

    @property
    def nodes(self) -> int:
        """Nodes of all graphs."""
        total = 0
        for graph in self._kept:
            total += int(check(driver.cuGraphGetNodes(driver.CUgraph(int(graph.graph)), 0), "cuGraphGetNodes")[1])
        return total

    def choose(self, tokens: int, rows: int, samples: int) -> StepGraph:
        """The first bucket that a step fits, as the device chooses. Raises ValueError if there is none."""
        for graph in self.graphs:
            b = graph.bucket
            fits = tokens <= b.tokens and rows <= b.rows and samples <= b.samples
            if fits and (not b.decode or tokens == rows):
                return graph
        raise ValueError(f"no step graph fits {tokens} tokens of {rows} rows, {samples} of them sampled")

    def launch(self, graph: StepGraph) -> None:
        """From the host; returns when the step is over."""
        check(driver.cuGraphLaunch(graph.executables[0], driver.CUstream(self.stream.ptr)), "cuGraphLaunch")
        self.stream.synchronize()


def address_table(graphs: list[StepGraph]) -> cp.ndarray:
    """Executables of all buckets, one after the other, as the device launches them: uint64."""
    return cp.asarray(np.array([int(e) for g in graphs for e in g.executables], np.uint64))
