"""The engine process with wrong plans: `python -m verification.faults.wrong_plans [engine arguments]`.

The shipped engine, but for the plan that a step is given: as if the scheduler had made a mistake in KV memory, for one
request and one step. Which mistake a request suffers its client says by the seed of its parameters (`seed_of`), so that
one engine shows them all, one at a time, beside requests that nothing happens to. Each one planted is written to
`planted.jsonl` in the run folder: reader and, where one is known, writer, as the KV sanitizer must name them.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.enums import PageState
from blink_core.runtime import cpu
from blink_core.runtime.cpu import CpuRuntime, Plan

FILE = "planted.jsonl"
HOST = "blink_core.runtime.engine_main"
_SIGNATURE = 0x5A4B56 << 40  # of a seed whose low byte is a fault's number

Identity = tuple[int, int, int]  # ring, slot, generation


def seed_of(fault: str) -> int:
    """The seed by which a request asks to suffer `fault`."""
    return _SIGNATURE | list(FAULTS).index(fault)


@dataclass(slots=True)
class Struck:
    """One row of a plan, and what may be done to it. start: position of its first new token; pages: of its table."""

    planter: Planter
    plan: Plan
    index: int
    start: int
    table: Any
    me: Identity
    undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Index of its last new token in the step's arrays."""
        row = self.plan.rows[self.index]
        return int(row["q_start"]) + int(row["q_len"]) - 1

    @property
    def full(self) -> int:
        """Pages that earlier steps filled."""
        return self.start // self.planter.size

    def others(self) -> list[int]:
        """Rows of the same step with a full page of their own."""
        rows, size = self.plan.rows, self.planter.size
        old = rows["context_len"] - rows["q_len"]
        return [r for r in range(len(rows)) if r != self.index and old[r] >= size]

    def rewrite(self, name: str, value: int) -> None:
        """Another value for the last new token in one of the plan's arrays; the plan itself stays as it is."""
        changed = getattr(self.plan, name).copy()
        changed[self.last] = value
        self.plan = replace(self.plan, **{name: changed})


class Planter:
    """Keeps who wrote each page last, as the plans say, and strikes whoever asks for it, once."""

    def __init__(self, runtime: CpuRuntime, file: Path) -> None:
        state = runtime.layouts["State"].views(runtime.state.buffer)
        self.pages, self.size, self.vocab = state["pages"], runtime.config.page_size, runtime.config.vocab
        self._slots, self._file = runtime.config.slots, file
        self.writers: dict[int, Identity] = {}
        self._hit: set[Identity] = set()
        self.undo: list[Callable[[], None]] = []

    def __call__(self, plan: Plan) -> Plan:
        seeds = plan.sampling["seed"].tolist()
        for index, seed in enumerate(seeds):
            number, row = seed & 0xFF, plan.rows[index]
            me = self.identity(int(row["request"]), int(row["generation"]))
            if seed & ~0xFF != _SIGNATURE or number >= len(FAULTS) or me in self._hit:
                continue
            start = int(row["context_len"]) - int(row["q_len"])
            struck = Struck(self, plan, index, start, plan.block_tables[index], me)
            if struck.full < 2:
                continue
            name = list(FAULTS)[number]
            planted = FAULTS[name](struck)
            if planted is None:
                continue
            self._hit.add(me)
            plan, self.undo = struck.plan, [*self.undo, *struck.undo]
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"fault": name, "step": plan.step, "reader": me, **planted}) + "\n")
        for row in plan.rows:
            first, count = int(row["q_start"]), int(row["q_len"])
            for slot in plan.kv_slots[first : first + count].tolist():
                self.writers[slot // self.size] = self.identity(int(row["request"]), int(row["generation"]))
        return plan

    def identity(self, request: int, generation: int) -> Identity:
        return request // self._slots, request % self._slots, generation

    def in_state(self, state: PageState, struck: Struck) -> list[int]:
        """Pages of a state that another request wrote last, and that are not in the struck row's table."""
        found = np.flatnonzero(self.pages["state"] == state).tolist()
        mine = set(struck.table.tolist())
        return [p for p in found if p not in mine and self.writers.get(p, struck.me) != struck.me]


def _put(struck: Struck, entry: int, page: int) -> dict[str, Any]:
    """Another page in the block table: the step reads whatever its rows hold."""
    struck.table[entry] = page
    size = struck.planter.size
    return {"page": page, "position": entry * size, "writer": struck.planter.writers.get(page)}


def foreign_page(struck: Struck) -> dict[str, Any] | None:
    """The first page of another running request in place of the own."""
    for other in struck.others():
        page = int(struck.plan.block_tables[other][0])
        if page != int(struck.table[0]) and struck.planter.writers.get(page, struck.me) != struck.me:
            return _put(struck, 0, page)
    return None


def swapped_pages(struck: Struck) -> dict[str, Any] | None:
    """Two full pages exchanged in the block table: what greedy tokens cannot show."""
    struck.table[:2] = struck.table[1::-1].copy()
    return {"page": int(struck.table[0]), "position": 0, "writer": struck.planter.writers.get(int(struck.table[0]))}


def freed_page(struck: Struck) -> dict[str, Any] | None:
    """A free page, whose rows a former owner wrote."""
    pages = struck.planter.in_state(PageState.FREE, struck)
    return _put(struck, 1, pages[0]) if pages else None


def stale_prefix_page(struck: Struck) -> dict[str, Any] | None:
    """A page of the prefix cache that holds other tokens."""
    pages = struck.planter.in_state(PageState.CACHED, struck)
    return _put(struck, 1, pages[0]) if pages else None


def wrong_position(struck: Struck) -> dict[str, Any] | None:
    """A token computed as if it stood one place further on."""
    struck.rewrite("positions", int(struck.plan.positions[struck.last]) + 1)
    return {"position": int(struck.plan.positions[struck.last]) - 1, "writer": struck.me}


def wrong_token(struck: Struck) -> dict[str, Any] | None:
    """A token computed in place of another."""
    struck.rewrite("token_ids", (int(struck.plan.token_ids[struck.last]) + 1) % struck.planter.vocab)
    return {"position": int(struck.plan.positions[struck.last]), "writer": struck.me}


def lost_append(struck: Struck) -> dict[str, Any] | None:
    """A row that goes to the page of padding, which nobody reads."""
    struck.rewrite("kv_slots", struck.planter.size)
    return {"position": int(struck.plan.positions[struck.last])}


def shifted_append(struck: Struck) -> dict[str, Any] | None:
    """A row one slot too far."""
    slot = int(struck.plan.kv_slots[struck.last])
    if (slot + 1) % struck.planter.size == 0:
        return None
    struck.rewrite("kv_slots", slot + 1)
    return {"position": int(struck.plan.positions[struck.last])}


def freed_early(struck: Struck) -> dict[str, Any] | None:
    """A page in use that the scheduler holds free: the next owner would overwrite it."""
    return _record(struck, PageState.FREE, -1, 0)


def given_away(struck: Struck) -> dict[str, Any] | None:
    """A page in use that the scheduler has given to another request, which has not written it yet."""
    for other in struck.others():
        row = struck.plan.rows[other]
        return _record(struck, PageState.OWNED, int(row["request"]), int(row["generation"]))
    return None


def _record(struck: Struck, state: PageState, owner: int, generation: int) -> dict[str, Any]:
    """Another record of the row's last full page, while the step runs: the scheduler must not act on it."""
    page = int(struck.table[struck.full - 1])
    record = struck.planter.pages[page : page + 1]
    kept = record.copy()
    record["state"], record["owner"], record["generation"] = int(state), owner, generation

    def undo() -> None:
        if int(record["state"][0]) == int(state) and int(record["owner"][0]) == owner:  # else it was let go meanwhile
            record["state"], record["owner"], record["generation"] = kept["state"], kept["owner"], kept["generation"]

    struck.undo.append(undo)
    named = None if owner < 0 else struck.planter.identity(owner, generation)
    return {
        "page": page,
        "position": (struck.full - 1) * struck.planter.size,
        "writer": struck.planter.writers.get(page),
        "page_owner": named,
    }


FAULTS: dict[str, Callable[[Struck], dict[str, Any] | None]] = {
    "foreign-page": foreign_page,
    "swapped-pages": swapped_pages,
    "freed-page": freed_page,
    "stale-prefix-page": stale_prefix_page,
    "wrong-position": wrong_position,
    "wrong-token": wrong_token,
    "lost-append": lost_append,
    "shifted-append": shifted_append,
    "freed-early": freed_early,
    "given-away": given_away,
}


def install(folder: Path) -> None:
    """Makes this process's plans go through a planter that writes to `folder`."""
    shipped_plan, shipped_run, shipped_serve = CpuRuntime.current_plan, CpuRuntime._run, CpuRuntime.serve
    planters: dict[int, Planter] = {}

    def current_plan(self: CpuRuntime) -> Plan:
        planter = planters.setdefault(id(self), Planter(self, folder / FILE))
        return planter(shipped_plan(self))

    def undo(self: CpuRuntime) -> None:
        planter = planters.get(id(self))  # None: the first plan could not be made, which is the error to see
        while planter is not None and planter.undo:
            planter.undo.pop(0)()

    def run(self: CpuRuntime, step: cpu.ModelStep) -> Any:
        try:
            return shipped_run(self, step)
        finally:
            undo(self)

    def serve(self: CpuRuntime, step: cpu.ModelStep) -> None:
        if type(self) is not CpuRuntime:  # it launches graphs, which read plan and block tables in memory
            shipped_graphs = self._run

            def run_graphs(step: cpu.ModelStep) -> Any:
                restore = _write(self, self.current_plan())
                try:
                    return shipped_graphs(step)
                finally:
                    restore()
                    undo(self)

            self._run = run_graphs  # type: ignore[method-assign]
        shipped_serve(self, step)

    CpuRuntime.current_plan = current_plan  # type: ignore[method-assign]
    CpuRuntime._run = run  # type: ignore[method-assign]
    CpuRuntime.serve = serve  # type: ignore[method-assign]


def _write(runtime: CpuRuntime, plan: Plan) -> Callable[[], None]:
    """Puts a changed plan where the engine's graphs read it; returns what puts the right one back."""
    tokens, rows, width = len(plan.token_ids), plan.rows["row"], plan.block_tables.shape[1]
    places: list[tuple[Any, Any, Any]] = [
        (runtime._plan_views[name], slice(tokens), getattr(plan, name))
        for name in ("token_ids", "positions", "kv_slots")
    ]
    places.append((runtime._tables, (rows, slice(width)), plan.block_tables))
    kept = [(array, at, array[at].copy()) for array, at, _ in places]
    for array, at, values in places:
        array[at] = values

    def restore() -> None:
        for array, at, values in kept:
            array[at] = values

    return restore


def command(engine_command: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments of Python that start a rig's engine with wrong plans; engine_command: the rig's own, empty for the
    shipped one. On a GPU the host launches the steps: a resident scheduler's plans are out of reach."""
    engine = ("--engine", *engine_command[1:2]) if engine_command else ()
    return ("-m", "verification.faults.wrong_plans", *engine)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--engine", default=HOST)
    own, arguments = parser.parse_known_args(argv)
    parser.add_argument("--run-dir", type=Path, required=True)
    install(parser.parse_known_args(argv)[0].run_dir)
    # By name: the suite imports no model code, and here it only starts the process that has it.
    sys.argv = [own.engine, *arguments, *(() if own.engine == HOST else ("--launch", "host"))]
    runpy.run_module(own.engine, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
