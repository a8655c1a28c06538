"""Whole programs for one scheduler, drawn before anything runs, and their execution on a harness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import ErrorReason, Op
from tests.unit.device.expectations import deserved
from tests.unit.device.front_end import FrontEnd, Submission, entry
from tests.unit.device.harness import VOCAB, Harness, small_config

CORRUPTIONS: tuple[tuple[str, Any], ...] = (
    ("prompt_len", 0),
    ("prompt_len", 2**32 - 1),
    ("prompt_offset", 2**32 - 1),
    ("max_tokens", 0),
    ("temperature", float("nan")),
    ("top_p", 0.0),
    ("flags", 2),
    ("n_stop", 9),
    ("priority", 1),
    ("deadline_us", 1),
    ("generation", 77),
    ("prompt_checksum", 1),
    ("tag", 5),  # valid when sealed, torn when not
)


@dataclass(frozen=True)
class Submit:
    ring: int
    length: int
    max_tokens: int
    ignore_eos: bool = True
    stop: int | None = None
    token: int = 1
    corruption: int | None = None
    sealed: bool = True


@dataclass(frozen=True)
class Act:
    """cancel, duplicate, withhold, release, bad_head, garbage, attach or drain on a ring; `pick` selects among many."""

    what: str
    ring: int
    pick: int = 0


@dataclass(frozen=True)
class Tick:
    before: tuple[Submit | Act, ...] = ()
    during: tuple[Submit | Act, ...] = ()
    model_last: bool = True  # the model runs after `during`, when cancels have hit its rows
    polls: int = 1
    fault: str | None = None  # nan, range, unwritten for row `row`; failed for the whole step
    row: int = 0


@dataclass(frozen=True)
class Program:
    config: EngineConfig
    ticks: tuple[Tick, ...] = field(repr=True)


@st.composite
def configs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> EngineConfig:
    """Tiny pools, queues and budgets: every limit is near."""
    page_size = draw(st.sampled_from([3, 1, 2, 4, 8]))
    max_len = draw(st.integers(6, 20))
    slots = draw(st.sampled_from([3, 1, 2, 5]))
    max_rows = draw(st.sampled_from([3, 1, 2, 4]))
    longest = -(-max_len // page_size)
    return small_config(
        rings=draw(st.integers(1, 3)),
        slots=slots,
        max_len=max_len,
        page_size=page_size,
        pages=2 + draw(st.integers(max(1, longest - 1), longest + 3)),
        max_rows=max_rows,
        token_budget=max_rows + draw(st.integers(0, 5)),
        cq_entries=1 << (slots + max_rows - 1).bit_length(),
        sq_entries=1 << (2 * slots + 1).bit_length(),
        visibility_polls=draw(st.integers(1, 3)),
        paused_limit=draw(st.integers(1, 3)),
    )


def _plain(config: EngineConfig) -> st.SearchStrategy[Submit]:
    """Valid requests, long for the pool, that run until a limit ends them."""
    return st.builds(
        Submit,
        ring=st.integers(0, config.rings - 1),
        length=st.integers(1, config.max_len - 1),
        max_tokens=st.integers(1, config.max_len),
        token=st.integers(0, VOCAB - 1),
    )


def _odd(config: EngineConfig) -> st.SearchStrategy[Submit]:
    """Requests with stop rules, oversize ones, and malformed ones."""
    return st.builds(
        Submit,
        ring=st.integers(0, config.rings - 1),
        length=st.one_of(st.integers(1, config.max_len - 1), st.integers(1, config.max_len)),
        max_tokens=st.integers(1, config.max_len + 1),
        ignore_eos=st.booleans(),
        stop=st.one_of(st.none(), st.integers(0, VOCAB - 1)),
        token=st.one_of(st.integers(0, VOCAB - 1), st.integers(0, VOCAB)),
        corruption=st.one_of(st.none(), st.integers(0, len(CORRUPTIONS) - 1)),
        sealed=st.booleans(),
    )


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Program:
    config = draw(configs())
    common = ["cancel"] * 6 + ["withhold", "release"] * 2 + ["duplicate", "bad_head", "garbage", "attach"]
    acts = st.builds(
        Act,
        what=st.sampled_from(common),
        ring=st.integers(0, config.rings - 1),
        pick=st.integers(0, 7),
    )
    plain, odd = _plain(config), _odd(config)
    actions = st.lists(st.one_of(plain, acts, odd), max_size=2).map(tuple)
    ticks = st.builds(
        Tick,
        before=actions,
        during=actions,
        model_last=st.booleans(),
        polls=st.integers(0, 2),
        fault=st.sampled_from([None] * 16 + ["nan", "range", "unwritten", "failed"]),
        row=st.integers(0, config.max_rows - 1),
    )
    burst = Tick(before=draw(st.lists(plain, min_size=2, max_size=6).map(tuple)))
    chosen = [burst, *draw(st.lists(ticks, min_size=4, max_size=16))]
    if draw(st.integers(0, 5)) == 5:
        chosen.append(Tick(before=(Act("drain", 0), draw(plain))))
    return Program(config, tuple(chosen))


def run(program: Program, **options: Any) -> Harness:
    """Runs a program to its end with all checks; returns the harness."""
    h = Harness(program.config, **options)
    h.attach()
    for tick in program.ticks:
        perform(h, tick)
    for front in h.fronts:
        front.withhold = False
        if not front.acknowledged:
            h.poll()
        front.consume()
    h.settle()
    return h


def perform(h: Harness, tick: Tick) -> None:
    for action in tick.before:
        act(h, action)
    launched = h.boundary()
    faults = {tick.row % max(1, h.n_rows): tick.fault} if tick.fault not in (None, "failed") else None
    if launched and not tick.model_last:
        h.run_model(faults, failed=tick.fault == "failed")
    for action in tick.during:
        act(h, action)
    for _ in range(tick.polls):
        h.poll()
    if launched and tick.model_last:
        h.run_model(faults, failed=tick.fault == "failed")
    for front in h.fronts:
        front.consume()
        if front.acknowledged:
            front.views["front_end"]["cq_head"] = front.cq_head  # mends a bad head


def act(h: Harness, action: Submit | Act) -> None:
    front = h.fronts[action.ring]
    if isinstance(action, Submit):
        submit(h, front, action)
        return
    ours: list[Submission] = [x for x in h.history if x.ring == front.index and x.epoch == front.epoch]
    chosen = ours[-1 - action.pick % len(ours)] if ours else None
    rs = h.state["rings"][front.index]
    if action.what == "cancel" and chosen:
        front.cancel(chosen)
    elif action.what == "duplicate" and chosen and front.sq_space() > len(front.live) + 1 and front.acknowledged:
        if front.generation[chosen.slot] == chosen.generation:
            front.publish(entry(front.sq_tail, Op.SUBMIT, chosen.slot, chosen.generation))
    elif action.what in ("withhold", "release"):
        front.withhold = action.what == "withhold"
    elif action.what == "bad_head":
        backwards, beyond = int(rs["cq_head"]) - 1 - action.pick, int(rs["cq_published"]) + 1 + action.pick
        front.views["front_end"]["cq_head"] = backwards if action.pick % 2 and backwards >= 0 else beyond
    elif action.what == "garbage":
        word = entry(front.sq_tail + 1 + action.pick, Op.SUBMIT, action.pick % 4, 1)
        front.views["sq"][front.sq_tail % h.config.sq_entries] = word
    elif action.what == "attach" and action.pick < 4:
        front.attach()
    elif action.what == "drain":
        h.control["control"]["drain_request"] = 1


def submit(h: Harness, front: FrontEnd, s: Submit) -> Submission | None:
    fields: dict[str, Any] = {"flags": int(s.ignore_eos), "seed": s.length * 17 + s.max_tokens, "choice": s.token}
    fields |= {"temperature": 0.5 * s.token, "stop_ids": () if s.stop is None else (s.stop,)}
    prompt = [(s.token + 3 * i) % VOCAB for i in range(s.length - 1)] + [s.token]
    corrupt = None if s.corruption is None else dict([CORRUPTIONS[s.corruption]])
    made = front.submit(prompt, s.max_tokens, corrupt=corrupt, sealed=s.sealed or corrupt is None, **fields)
    if made is not None:
        made.refusal = deserved(h.config, made.descriptor, made.generation, front.views["arena"])
        if made.refusal not in (None, ErrorReason.DRAINING):
            h.situations.add(f"refused {made.refusal.name}")
    return made
