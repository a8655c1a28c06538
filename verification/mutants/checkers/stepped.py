"""Checkers over drawn programs on the scheduler stepped by hand (`verification.scheduler`), one group of checks each.

All run the same programs on their own harness; each has only its own functions decide, and follows what the others
would check. What they do not use: the specification, and each other's functions.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Mapping
from functools import lru_cache

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import LogLevel, SlotFlag
from verification.mutants.checkers.base import Finding, Product, found, left
from verification.mutants.checkers.lock_step import GROUP_FILES
from verification.mutants.model import Mutant
from verification.scheduler.harness import Harness, small_config
from verification.scheduler.programs import Program, programs, run

PROGRAMS = 60  # of one seed
SETTLED_WITHIN = 400  # steps
_S = "verification.scheduler"
_NEVER_ENDED = "settle"  # objects that requests live on: `PROGRESS` judges that


@lru_cache(maxsize=64)
def _drawn(seed: int) -> tuple[Program, ...]:
    out: list[Program] = []

    @seeded(seed)
    @settings(
        max_examples=PROGRAMS,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def collect(program: Program) -> None:
        out.append(program)

    collect()
    return tuple(out)


class Stepped:
    """One group of checks. functions: dotted name -> classes; a clause is the function that objected."""

    where = frozenset({"native"})
    seconds = 15.0

    def __init__(self, name: str, checks: str, functions: Mapping[str, str]) -> None:
        self.name, self._checks = name, frozenset({checks})
        self.functions = frozenset(functions)
        self._by_code = {dotted.rsplit(".", 1)[1]: dotted for dotted in functions}
        self.clauses: Mapping[str, frozenset[str]] = {name: frozenset(classes) for name, classes in functions.items()}

    def prepare(self, seed: int) -> None:
        """Draws the programs of a seed; kept for later runs of this process."""
        _drawn(seed)

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """Programs until one of the group's functions objects."""
        for number, program in enumerate(_drawn(seed)):
            if left(deadline) == 0:
                raise TimeoutError(f"{number} of {PROGRAMS} programs were run")
            try:
                run(program, native=product.native, checks=self._checks, limit=SETTLED_WITHIN)
            except AssertionError as error:
                frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
                clause = next((self._by_code[name] for name in reversed(frames) if name in self._by_code), None)
                if clause is not None:
                    return found(self, clause, f"program {number}: {error}")
                if _NEVER_ENDED not in frames:
                    raise
        return None


MEMORY = Stepped(
    "raw-memory",
    "memory",
    {
        f"{_S}.invariants.check_pages": "K",
        f"{_S}.invariants.check_lists": "KQS",
        f"{_S}.invariants.check_requests": "BKSX",
        f"{_S}.invariants.check_fifo": "Q",
        f"{_S}.invariants.check_credits": "R",
        f"{_S}.invariants.check_deficits": "Q",
        f"{_S}.invariants.check_idle": "K",
        f"{_S}.invariants.check_fresh": "KQS",
    },
)
PROGRESS = Stepped(
    "progress",
    "progress",
    {f"{_S}.invariants.check_progress": "GQS", f"{_S}.harness.Harness.settle": "DQSVX"},
)
CACHE = Stepped(
    "cache-recount",
    "cache",
    {
        f"{_S}.cache_invariants.check_tree": "P",
        f"{_S}.cache_invariants.check_buckets": "P",
        f"{_S}.cache_invariants.check_lru": "P",
        f"{_S}.cache_invariants.check_holders": "P",
        f"{_S}.cache_invariants.check_cache": "P",
    },
)
LOG = Stepped("log-inputs", "log", {f"{_S}.log_inputs.check": "DRV", f"{_S}.log_inputs.check_clock": "VX"})
LEDGER = Stepped(
    "client-ledger",
    "ledger",
    {
        f"{_S}.harness.Harness.check_event": "BDRS",
        f"{_S}.harness.Harness.check_alternatives": "R",
        f"{_S}.harness.Harness.check_end": "BDRSX",
        f"{_S}.harness.Harness.check_ends": "R",
        f"{_S}.harness.Harness.check_queue": "DR",
        f"{_S}.harness.Harness.check_call": "VX",
        f"{_S}.harness.Harness.check_status": "GX",
        f"{_S}.harness.Harness.check_taken": "DVX",
        f"{_S}.harness.Harness.check_beat": "X",
    },
)
PLAN = Stepped(
    "plan-and-kv",
    "plan",
    {
        f"{_S}.scripted_model.check_plan": "GS",
        f"{_S}.scripted_model.check_sampling": "SV",
        f"{_S}.scripted_model.TaggedPool.check": "KPS",
        f"{_S}.scripted_model.sample": "DS",
        f"{_S}.scripted_model.run": "GK",
    },
)


RINGS, MOVES = 4, 64  # most rings of a boundary that is taken together, and pages that it fills


class Steady:
    """A group of threads over more rows than words of a row set hold: plans, tokens, events, the prefix cache, and that
    it takes every boundary together at which all rows have a token and go on. Where it does not, nothing is wrong but
    slow."""

    name = "steady-boundaries"
    where = frozenset({"native"})
    clauses: Mapping[str, frozenset[str]] = {
        "taken together": frozenset("GS"),
        "rows together": frozenset("DGKRS"),
        "pages together": frozenset("KP"),
    }
    functions = frozenset({"verification.mutants.checkers.stepped.Steady.judge"})
    seconds = 60.0

    def applies(self, mutant: Mutant) -> bool:
        """Whether only a group of threads runs what it changes."""
        return mutant.file.endswith(GROUP_FILES)

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """Rows that outlast a few boundaries, and end: of drawn lengths, then more of them and all alike."""
        rng = random.Random(f"steady/{seed}")
        try:
            return self.judge(product, rng, alike=False) or self.judge(product, rng, alike=True)
        except AssertionError as error:
            return found(self, "rows together", str(error))

    def judge(self, product: Product, rng: random.Random, *, alike: bool) -> Finding | None:
        """Raises AssertionError for what the harness finds wrong."""
        rows = rng.randrange(129, 140) if alike else rng.randrange(65, 90)
        rings, length, new = rng.randrange(1, RINGS + (1 if alike else 2)), 5, 12
        slots, most = -(-rows // rings), length + new
        config = small_config(
            rings=rings, slots=slots, max_rows=rows, max_len=most, pages=2 + rows * (most // 4 + 1),
            token_budget=rows * length, cq_entries=4096, sq_entries=512, arena_tokens=slots * 32, masks=0,
            quantum=1 << 12, log_level=LogLevel.DECISIONS,
        )  # fmt: skip
        h = Harness(config, native=product.native, group_size=rng.randrange(2, 5), checks=("ledger", "plan"))
        h.attach()
        shortest = rng.randrange(1, length + 1) if alike else 1
        longest = shortest if alike else length
        for i in range(rows):
            prompt = [rng.randrange(1, config.vocab) for _ in range(rng.randrange(shortest, longest + 1))]
            h.fronts[i % rings].submit(prompt, new, flags=SlotFlag.IGNORE_EOS)
        expected, before, filled = 0, None, 0
        for _ in range(new + 6):
            launched = h.tick()
            planned = h.plan["rows"][: h.n_rows]
            now = planned["request"].tolist() if launched and planned["sample"].all() else None
            steady = now is not None and now == before and len(now) == rows
            expected += steady and filled <= MOVES and rings <= RINGS
            ends = planned["context_len"]
            filled = int((ends // config.page_size - (ends - planned["q_len"]) // config.page_size).sum())
            before = now
            if launched and (late := self._unpublished(h, planned["request"])):
                return found(self, "pages together", f"full pages of requests {late[:8]} are not in the prefix cache")
        taken = h.scheduler.steady_boundaries
        # Rows that are alike fill their pages at the same boundaries.
        least = 0 if rings > RINGS else new - 3 - (new // config.page_size + 1 if alike else 0)
        if taken != expected or expected < least:
            words = f"{taken} boundaries were taken together by {rows} rows of {rings} rings, {expected} could be"
            return found(self, "taken together", words)
        return None

    def _unpublished(self, h: Harness, requests: Array) -> list[int]:
        """Those of the requests that have a token and a full page that is not shared (K6)."""
        q = h.state["requests"][requests]
        late = (q["emitted"] > 0) & (q["published"] != q["computed"] // h.config.page_size)
        return [int(request) for request in requests[late]]


CHECKERS = (MEMORY, PROGRESS, CACHE, LOG, LEDGER, PLAN, Steady())
