"""The engine process with one planted fault: `python tests/planted/engine.py FAULT [engine arguments]`.

A rig description names it in `engine_command`, so that `blink certify` runs unchanged against the broken engine.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

MUTANT = "BLINK_TEST_MUTANT"  # name of a native mutant; none: the build with mutants, and none of them active


def native_mutant() -> None:
    """The scheduler built with mutants, one of them active."""
    from verification.mutants import native, weave

    woven = weave.build()
    name = os.environ.get(MUTANT, "")
    native.install(woven.path, woven.identities[name] if name else 0)


def foreign_kv_row() -> None:
    """Class K: once in each request's life, one row of its KV is overwritten by one that belongs elsewhere."""
    from blink_core.runtime import model_step

    shipped = model_step.ModelStep.__call__
    position, due = 3, 12
    hit: set[tuple[int, int]] = set()

    def planted(self: model_step.ModelStep, plan: Any) -> None:
        size = self._kv.page_size
        old = plan.rows["context_len"].astype(int) - plan.rows["q_len"]
        for row in range(len(plan.rows)):
            key = (int(plan.rows["request"][row]), int(plan.rows["generation"][row]))
            if old[row] < due or key in hit:
                continue
            hit.add(key)
            others = [r for r in range(len(plan.rows)) if r != row and old[r] >= due]
            source = (plan.block_tables[others[0]], position) if others else (plan.block_tables[row], position + 4)
            for pool in (self._kv.k, self._kv.v):
                taken = pool[:, source[0][source[1] // size], source[1] % size]
                pool[:, plan.block_tables[row][position // size], position % size] = taken
        shipped(self, plan)

    model_step.ModelStep.__call__ = planted  # type: ignore[method-assign]


def rotary_position() -> None:
    """Class O: the token at position 10 is rotated as if it stood at 11."""
    from blink_core.runtime import model_step

    shipped = model_step.step_batch

    def planted(plan: Any) -> Any:
        batch = shipped(plan)
        positions = batch.positions.copy()
        positions[positions == 10] += 1
        return dataclasses.replace(batch, positions=positions)

    model_step.step_batch = planted


def family_parts() -> None:
    """Class O: what some families have beside Llama, each wrong: a window too short by one, keys that LongRoPE does not
    compute anew, and experts' weights normalised where they should not be, or the reverse."""
    from blink_core.models import phi3
    from blink_core.ops import numpy_ops

    shipped_plan, shipped_route = numpy_ops.NumpyOps.plan_attention, numpy_ops.NumpyOps.route

    def plan(self: Any, starts: Any, lens: Any, tables: Any, page_size: int, window: int | None = None) -> Any:
        return shipped_plan(self, starts, lens, tables, page_size, None if window is None else window - 1)

    def route(self: Any, logits: Any, top_k: int, *, normalize: bool) -> Any:
        return shipped_route(self, logits, top_k, normalize=not normalize)

    numpy_ops.NumpyOps.plan_attention = plan  # type: ignore[method-assign, assignment]
    numpy_ops.NumpyOps.route = route  # type: ignore[method-assign]
    phi3.Phi3._outgrown = lambda *step: iter(())  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "native-mutant": native_mutant,
    "foreign-kv-row": foreign_kv_row,
    "rotary-position": rotary_position,
    "family-parts": family_parts,
}


def main(argv: list[str]) -> int:
    FAULTS[argv[0]]()
    from blink_core.runtime.engine_main import main as engine_main

    return engine_main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
