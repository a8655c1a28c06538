"""Token equivalence at the layer shapes of large models: build, serve, compare with HuggingFace on the same machine.

The engine is a process of its own and has ended before the oracle takes the GPU. float32 is decided by the float32
criterion (`verification.criterion.tokens`), bfloat16 by that of kernels. The weights lie in a temporary folder, which
is removed whatever happens.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.dtypes import Array
from hil_rigs.description import RigDescription
from hil_rigs.local import LocalRig
from verification.criterion import row_rms
from verification.criterion.kernels import judge_kernels
from verification.history import History
from verification.on_device import shapes
from verification.oracles.hf import HFOracle
from verification.program import Shape, draw_program
from verification.properties import token_equivalence
from verification.result import CheckResult, Verdict, merge
from verification.serving import options_of
from verification.subject import RING, Subject
from verification.thresholds import Thresholds, default_thresholds

Rows = dict[token_equivalence.Key, Array]
SIZES = {"pages": 258, "max_rows": 8, "token_budget": 128, "max_len": 384, "slots": 32, "sq_entries": 128}
DTYPES = ("float32", "bfloat16")
MOST_PROGRAMS = 12
ORACLE_THREADS = 8  # they load and convert; on the CPU the oracle computes with one
BACKENDS = ("eager", "sdpa")


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine gave: histories, and the captured logits of every delivered token."""

    histories: list[History]
    rows: list[Rows]
    seconds: float


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """Verdicts by element type, and seconds of each part."""

    shape: str
    parameters: int
    verdicts: Mapping[str, CheckResult]
    seconds: Mapping[str, float]

    @property
    def ok(self) -> bool:
        return all(result.ok() for result in self.verdicts.values())


def check_shape(
    name: str,
    description: RigDescription,
    *,
    layers: int = shapes.LAYERS,
    dtypes: tuple[str, ...] = DTYPES,
    seed: int = 0,
    device: str = "cuda",
    folder: Path | None = None,
    thresholds: Thresholds | None = None,
) -> ShapeResult:
    """One shape, whole. device: of torch. folder: where the temporary one is made; the system's own by default.

    Raises RigFailure when an engine does not start, ValueError for an unknown shape or type.
    """
    if unknown := set(dtypes) - set(DTYPES):
        raise ValueError(f"element types {', '.join(sorted(unknown))}; known: {', '.join(DTYPES)}")
    limits = thresholds or default_thresholds()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix=f"blink-{name}-", dir=folder) as place:
        model = Path(place) / name
        model.mkdir()
        with _timed(seconds, "build"):
            parameters = shapes.build(name, model, layers=layers, seed=seed, device=device)
            _free(device)
        served = {}
        for dtype in dtypes:
            with _timed(seconds, f"serve {dtype}"):
                served[dtype] = serve(model, description, dtype, seed, limits)
        verdicts: dict[str, CheckResult] = {}
        if "float32" in dtypes:
            with _timed(seconds, "judge float32"):
                verdicts["float32"] = _judge_float32(model, served["float32"], limits, device)
                _free(device)
        for dtype in dtypes:
            if dtype != "float32":
                with _timed(seconds, f"judge {dtype}"):
                    verdicts[dtype] = _judge_kernels(model, served[dtype], limits, device)
                    _free(device)
    return ShapeResult(name, parameters, verdicts, seconds)


def serve(model: Path, description: RigDescription, dtype: str, seed: int, limits: Thresholds) -> Served:
    """Drawn greedy programs, until there are rows enough; with chunked prefill and full batches in them."""
    begin = time.monotonic()
    command: tuple[str, ...] = ()
    if description.kind == "gpu":
        command = (*description.engine_command, "--dtype", dtype)
    options = options_of(SIZES, None, capture=True, verbosity="info", engine_command=command)
    histories: list[History] = []
    found: list[Rows] = []
    count = 0
    with LocalRig(description, model, http=False, options=options) as rig:
        config = rig.descriptor.config
        shape = Shape(config.vocab, config.page_size, config.max_len, requests=(8, 10), cancels=0.0, sampled=0.0)
        subject = Subject(model.name, rig, rig.ring(RING), shape, limits, config.max_len)
        rng = random.Random(seed)
        while count < limits.tokens.min_rows * 3 // 2:
            if len(histories) == MOST_PROGRAMS:
                raise ValueError(f"{count} rows from {MOST_PROGRAMS} programs")
            history = subject.run(draw_program(rng, shape))
            if history.died or history.broken or not history.complete:
                raise RuntimeError(f"{model.name}, {dtype}: {history.died or history.broken or 'not complete'}")
            assert rig.descriptor.capture is not None
            records = token_equivalence.read_window(Path(rig.descriptor.capture), config.vocab, history.capture)
            rows, result = token_equivalence.index_capture(records, config.vocab)
            for checked in (result, token_equivalence.check_capture(history, rows)):
                if not checked.ok():
                    raise RuntimeError(f"{model.name}, {dtype}: {checked.clause}: {checked.message}")
            histories.append(history)
            found.append(rows)
            count += sum(len(history.tokens_of(s)) for s in history.submitted)
    return Served(histories, found, time.monotonic() - begin)


def _judge_float32(model: Path, served: Served, limits: Thresholds, device: str) -> CheckResult:
    oracles = HFOracle.load_pair(model, threads=_threads(device), device=device)
    parts = []
    for history, rows in zip(served.histories, served.rows, strict=True):
        parts += token_equivalence.score(history, rows, *oracles)
    return token_equivalence.judge(parts, limits.tokens)


def _judge_kernels(model: Path, served: Served, limits: Thresholds, device: str) -> CheckResult:
    sequences, starts, logits = [], [], []
    for history, rows in zip(served.histories, served.rows, strict=True):
        for s in history.submitted:
            prompt, tokens = history.program.requests[s.request].prompt, history.tokens_of(s)
            if not tokens:
                continue
            sequences.append([*prompt, *tokens[:-1]])
            starts.append(len(prompt) - 1)
            keys = [(history.ring, s.slot, s.generation, len(prompt) + i) for i in range(len(tokens))]
            logits.append(np.stack([rows[key]["logits"] for key in keys]))
    reference = _forced(model, "float64", "eager", sequences, starts, device)
    errors = {}
    for attention in BACKENDS:
        own = _forced(model, "bfloat16", attention, sequences, starts, device)
        errors[attention] = _row_errors(own, reference)
    return judge_kernels(_row_errors(logits, reference), errors, limits.kernels)


def _forced(
    model: Path, dtype: Any, attention: str, sequences: list[list[int]], starts: list[int], device: str
) -> list[Any]:
    oracle = HFOracle.load(model, dtype=dtype, attention=attention, threads=_threads(device), device=device)
    found = [run.logits for run in oracle.forward_many(sequences, start=starts)]
    del oracle
    _free(device)
    return found


def _row_errors(logits: list[Any], reference: list[Any]) -> Any:
    parts = [row_rms(a.astype(np.float64) - b) for a, b in zip(logits, reference, strict=True)]
    return np.concatenate(parts)


def _threads(device: str) -> int:
    return 1 if device == "cpu" else ORACLE_THREADS


def _free(device: str) -> None:
    """Gives the GPU's memory back to the engine that starts next."""
    gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - begin, 1)


def summary(result: ShapeResult) -> CheckResult:
    """One verdict of all types; unknown for none."""
    if not result.verdicts:
        return CheckResult(Verdict.UNKNOWN, token_equivalence.PROPERTY, "rows", "nothing was compared")
    return merge(list(result.verdicts.values()))
