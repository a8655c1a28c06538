"""A graph that the host launches once: WHILE { scheduler; SWITCH { the step of a bucket } } [design 6].

The scheduler's kernel says by conditional handles which bucket's step follows it, and when the loop is over. Nothing is
launched from the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp
from cuda.bindings import driver

from blink_core.ops.cuda_modules import CudaError, Kernels, check

log = logging.getLogger("blink.cuda")


def capture_into(graph: Any, stream: cp.cuda.Stream, work: Callable[[], None]) -> None:
    """Adds to a CUgraph what `work` launches on the current stream. Raises CudaError."""
    handle = driver.CUstream(stream.ptr)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with stream:
        check(driver.cuStreamBeginCaptureToGraph(handle, graph, None, None, 0, mode), "cuStreamBeginCaptureToGraph")
        try:
            work()
        except BaseException:
            driver.cuStreamEndCapture(handle)  # the reason is on its way already
            raise
        check(driver.cuStreamEndCapture(handle), "cuStreamEndCapture")


def nodes_of(graph: Any) -> list[Any]:
    """Nodes of a CUgraph."""
    count = int(check(driver.cuGraphGetNodes(graph, 0), "cuGraphGetNodes")[1])
    return list(check(driver.cuGraphGetNodes(graph, count), "cuGraphGetNodes")[0]) if count else []


class SwitchGraph:
    """The loop for `count` buckets. Make it, give the scheduler `branch` and `loop`, then :meth:`fill` it."""

    def __init__(self, stream: cp.cuda.Stream, count: int) -> None:
        """Raises CudaError."""
        self._stream, self._count = stream, count
        self.executable: Any = None
        self._bodies: list[Any] = []
        self._context = check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
        self._graph = check(driver.cuGraphCreate(0), "cuGraphCreate")
        try:
            self._loop = self._handle(1, int(driver.CU_GRAPH_COND_ASSIGN_DEFAULT))  # a launch begins with the loop on
            self._branch = self._handle(0, 0)  # the scheduler sets it each time
            kind = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
            (self._body,) = self._conditional(self._graph, self._loop, kind, 1, [])
        except BaseException:
            self.close()
            raise

    @property
    def branch(self) -> int:
        """Handle of the SWITCH: a bucket's index, or `count` for no step."""
        return int(self._branch)

    @property
    def loop(self) -> int:
        """Handle of the WHILE: 0 ends it."""
        return int(self._loop)

    def _handle(self, initial: int, flags: int) -> Any:
        return check(
            driver.cuGraphConditionalHandleCreate(self._graph, self._context, initial, flags),
            "cuGraphConditionalHandleCreate",
        )

    def _conditional(self, graph: Any, handle: Any, kind: Any, size: int, after: list[Any]) -> list[Any]:
        """Adds a conditional node behind others; returns its bodies."""
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle, params.conditional.type = handle, kind
        params.conditional.size, params.conditional.ctx = size, self._context
        check(driver.cuGraphAddNode(graph, after or None, None, len(after), params), "cuGraphAddNode (conditional)")
        return list(params.conditional.phGraph_out)

    def fill(self, scheduler: Callable[[], None], steps: Sequence[Callable[[], None]]) -> None:
        """Captures the scheduler's launch and each bucket's step, once, and makes the CUgraphExec ``executable``,
        uploaded. Raises CudaError, also where the scheduler is not one kernel."""
        if len(steps) != self._count:
            raise CudaError(f"{len(steps)} steps for a switch of {self._count}")
        capture_into(self._body, self._stream, scheduler)
        first = nodes_of(self._body)
        if len(first) != 1:
            raise CudaError(f"the scheduler was captured as {len(first)} nodes, expected 1")
        kind = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH
        self._bodies = self._conditional(self._body, self._branch, kind, self._count, first)
        for body, step in zip(self._bodies, steps, strict=True):
            capture_into(body, self._stream, step)
        self.executable = check(driver.cuGraphInstantiate(self._graph, 0), "cuGraphInstantiate (switch)")
        check(driver.cuGraphUpload(self.executable, driver.CUstream(self._stream.ptr)), "cuGraphUpload")
        self._stream.synchronize()

    @property
    def nodes(self) -> int:
        """Nodes of all steps."""
        return sum(len(nodes_of(body)) for body in self._bodies)

    def close(self) -> None:
        """Frees the graphs; the loop has ended before."""
        if self.executable is not None:
            driver.cuGraphExecDestroy(self.executable)
            self.executable = None
        if self._graph is not None:
            driver.cuGraphDestroy(self._graph)
            self._graph = None


def make_switch(
    stream: cp.cuda.Stream,
    scheduler: Callable[[int, int], None],
    steps: Sequence[Callable[[], None]],
    kernels: Kernels | None,
) -> SwitchGraph:
    """The loop, ready for launch. ``scheduler`` launches the scheduler's kernel with the handles `branch` and `loop`.

    Where the driver refuses the steps with programmatic dependence of their ``kernels``, they are captured without it,
    which the log says. Raises CudaError.
    """
    while True:
        graph = SwitchGraph(stream, len(steps))
        try:
            graph.fill(lambda made=graph: scheduler(made.branch, made.loop), steps)  # type: ignore[misc]
        except CudaError as error:
            graph.close()
            if kernels is None or not kernels.dependent:
                raise
            log.warning("%s: the steps are captured again without programmatic dependence", error)
            kernels.dependent = False
        except BaseException:
            graph.close()
            raise
        else:
            return graph
