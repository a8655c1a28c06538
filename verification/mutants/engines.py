"""Engines that checkers of Python mutants drive: in a process of their own, stepped by hand (`hil_rigs.stepped`)."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.dtypes import EVENT
from blink_core.abi.params import SamplingParams
from verification.history import History, Submitted
from verification.mutants.checkers.base import Product
from verification.mutants.parts import Part, Parts
from verification.program import Program, RequestSpec

SIZES = {
    "pages": 66,
    "page_size": 16,
    "max_rows": 8,
    "token_budget": 128,
    "max_len": 160,
    "slots": 16,
    "sq_entries": 64,
    "cq_entries": 1024,
    "arena_tokens": 1 << 13,
    "log_entries": 1 << 10,
    "lease_us": 0,
}

_running: dict[str, Parts] = {}


def parts_of(product: Product, deadline: float) -> Parts:
    """The process that holds the product's parts; one for the checkers that follow each other on one product.

    deadline: `time.monotonic()` at which calls give up. It is started anew where it has ended.
    """
    key = "" if product.mutant is None else product.mutant.name
    parts = _running.get(key)
    if parts is None or not parts.alive:
        for other in _running.values():
            other.close()
        _running.clear()
        parts = _running[key] = Parts(product.environ)
    parts.deadline = deadline
    return parts


@atexit.register
def stop_parts() -> None:
    """Ends the processes of `parts_of`."""
    for parts in _running.values():
        parts.close()
    _running.clear()


@contextmanager
def stepped(parts: Parts, scratch: Path, model: Path | None, **options: Any) -> Iterator[Part]:
    """An engine over a model's folder (None: the no-op model). Raises PartError if it does not start.

    options: fields of EngineConfig over `SIZES`, and the three keywords of `SteppedEngine`.
    """
    own = ("batch_invariant", "poll_between_writes", "failing_step")
    flags = {name: options.pop(name) for name in own if name in options}
    folder = tempfile.mkdtemp(dir=scratch)
    where = None if model is None else str(model)
    engine = parts.keep("hil_rigs.stepped:SteppedEngine", where, folder, SIZES | options, **flags)
    try:
        yield engine
    finally:
        if parts.alive:
            engine.call("close")
            parts.drop(engine)


def run(engine: Part, requests: Sequence[RequestSpec]) -> tuple[dict[str, Any], History]:
    """Runs requests on a stepped engine: what `SteppedEngine.run` returned, and the same as a history."""
    asked = [(list(r.prompt), r.params, r.after, r.cancel_after) for r in requests]
    result: dict[str, Any] = engine.call("run", asked)
    history = History(Program(tuple(requests)), 0)
    for index, one in enumerate(result["requests"]):
        if one is not None:
            history.submitted.append(Submitted(index, one["slot"], one["generation"], one["sq_index"]))
    history.submitted.sort(key=lambda s: s.sq_index)
    history.cancels = set(result["cancelled"])
    history.calls = [tuple(call) for call in result["calls"]]
    history.complete = result["done"]
    history.deliver(np.frombuffer(result["events"], EVENT))
    return result, history


def greedy(prompt: Sequence[int], new: int, after: int = 0, **fields: Any) -> RequestSpec:
    """A plain greedy request of `new` tokens that ignores the end of sequence."""
    return RequestSpec(tuple(prompt), SamplingParams(new, ignore_eos=True, **fields), after)
