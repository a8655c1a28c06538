"""Whole programs for one scheduler, drawn before anything runs, and their execution on a harness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import Admission, ErrorReason, Op, SlotFlag
from verification.scheduler.expectations import deserved
from verification.scheduler.front_end import SEQUENCES, FrontEnd, Submission, entry
from verification.scheduler.harness import VOCAB, Harness, small_config

CORRUPTIONS: tuple[tuple[str, Any], ...] = (
    ("prompt_len", 0),
    ("prompt_len", 2**32 - 1),
    ("prompt_offset", 2**32 - 1),
    ("max_tokens", 0),
    ("temperature", float("nan")),
    ("top_p", 0.0),
    ("flags", 8),
    ("n_stop", 9),
    ("priority", 4),
    ("n_bias", 2**32 - 1),
    ("generation", 77),
    ("prompt_checksum", 1),
    ("min_p", -0.5),
    ("repetition_penalty", 0.0),
    ("presence_penalty", float("inf")),
    ("min_tokens", 2**31),
    ("logprobs", 21),
    ("mask_box", 4096),
    ("tag", 5),  # valid when sealed, torn when not
)
ACTS = ["cancel"] * 6 + ["withhold", "release", "silence", "silence", "speak"] * 2
ACTS += ["duplicate", "bad_head", "garbage", "attach", "mask_torn", "mask_early", "mask_other", "later", "earlier"]
ACTS += ["mask_torn"] * 5
EXAMPLES = "BLINK_TEST_EXAMPLES"  # environment: programs that a shortened run draws
FAULTS = ["nan", "range", "unwritten", "no_token", "poison", "failed"]


@dataclass(frozen=True)
class Submit:
    """`token` selects the prompt's beginning, so that equal ones share pages."""

    ring: int
    length: int
    max_tokens: int
    ignore_eos: bool = True
    stop: int | None = None
    token: int = 1
    priority: int = 0
    cache: bool = True
    masked: bool = False
    deadline: int = 0
    logprobs: int = 0
    min_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    corruption: int | None = None
    sealed: bool = True


@dataclass(frozen=True)
class Act:
    """One of ACTS, drain or stop on a ring; `pick` selects among many or says how much."""

    what: str
    ring: int
    pick: int = 0


@dataclass(frozen=True)
class Tick:
    before: tuple[Submit | Act, ...] = ()
    during: tuple[Submit | Act, ...] = ()
    model_last: bool = True  # the model runs after `during`, when cancels have hit its rows
    polls: int = 1
    fault: str | None = None  # one of FAULTS, of row `row`; failed for the whole step
    row: int = 0
    masks: int = 1  # posted before the boundary: 1, during the step: 2, not at all: 0


@dataclass(frozen=True)
class Program:
    """first: number of each ring's first submission entry. counted: each ring's events, and requests, before it."""

    config: EngineConfig
    ticks: tuple[Tick, ...] = field(repr=True)
    first: int = 0
    counted: int = 0


@st.composite
def configs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> EngineConfig:
    """Tiny pools, queues and budgets: every limit is near."""
    page_size = draw(st.sampled_from([2, 1, 3, 4, 8]))
    max_len = draw(st.integers(6, 20))
    slots = draw(st.sampled_from([3, 1, 2, 5]))
    max_rows = draw(st.sampled_from([3, 1, 2, 4]))
    longest = -(-max_len // page_size)
    return small_config(
        rings=draw(st.integers(1, 3)),
        slots=slots,
        max_len=max_len,
        page_size=page_size,
        pages=2
        + draw(st.sampled_from([longest, max(1, longest - 1), max(1, longest - 1), *range(longest + 1, longest + 4)])),
        max_rows=max_rows,
        token_budget=max_rows + draw(st.integers(0, 5)),
        cq_entries=draw(st.sampled_from([1, 2, 4])) << (slots + max_rows - 1).bit_length(),
        sq_entries=1 << (2 * slots + 1).bit_length(),
        visibility_us=draw(st.integers(1, 6)),
        paused_limit=draw(st.integers(1, 3)),
        prefix_cache=draw(st.sampled_from([1, 1, 1, 0])),
        admission=draw(st.sampled_from([Admission.OPTIMISTIC, Admission.OPTIMISTIC, Admission.RESERVE])),
        quantum=draw(st.sampled_from([5, 1, 2, 40])),
        reservation_steps=draw(st.sampled_from([2, 1, 4])),
        lease_us=draw(st.sampled_from([0, 5, 15])),
        log_entries=draw(st.sampled_from([1 << 14, 1 << 14, 8])),
        max_bias=draw(st.sampled_from([2, 0])),
        max_logprobs=draw(st.sampled_from([20, 3])),
        masks=draw(st.sampled_from([slots, slots, 1, 0])),
    )


def _plain(config: EngineConfig, late: bool) -> st.SearchStrategy[Submit]:
    """Valid requests, long for the pool, that run until a limit ends them."""
    can = config.masks >= config.slots
    return st.builds(
        Submit,
        ring=st.integers(0, config.rings - 1),
        length=st.integers(1, config.max_len - 1),
        max_tokens=st.integers(1, config.max_len),
        token=st.integers(0, 2),
        priority=st.sampled_from([0, 0, 0, 1, 3]),
        cache=st.sampled_from([True, True, True, False]),
        masked=st.sampled_from([False, can, can, can] if late else [False, False, False, can]),
    )


def _odd(config: EngineConfig) -> st.SearchStrategy[Submit]:
    """Requests that use every feature, oversize ones, and malformed ones."""
    pairs = st.tuples(st.sampled_from([3, 0, VOCAB - 1, VOCAB]), st.sampled_from([1.5, -2.0, -100.0]))
    return st.builds(
        Submit,
        ring=st.integers(0, config.rings - 1),
        length=st.one_of(st.integers(1, config.max_len - 1), st.integers(1, config.max_len)),
        max_tokens=st.integers(1, config.max_len + 1),
        ignore_eos=st.booleans(),
        stop=st.one_of(st.none(), st.integers(0, VOCAB - 1)),
        token=st.sampled_from([1, 0, 2, 5, VOCAB]),
        priority=st.integers(0, 3),
        masked=st.sampled_from([True, False, True]),
        deadline=st.sampled_from([0, 1, 6, 25, 2**64 - 1]),
        logprobs=st.sampled_from([0, 1, 2, 3, 20]),
        min_tokens=st.sampled_from([0, 0, 3]),
        bias=st.lists(pairs, max_size=3).map(tuple),
        corruption=st.one_of(st.none(), st.none(), st.integers(0, len(CORRUPTIONS) - 1)),
        sealed=st.booleans(),
    )


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Program:
    config = draw(configs())
    acts = st.builds(
        Act,
        what=st.sampled_from(ACTS),
        ring=st.integers(0, config.rings - 1),
        pick=st.integers(0, 7),
    )
    # Most requests want masks, which seldom come before the end.
    late = config.masks >= config.slots and draw(st.sampled_from([False, True]))
    plain, odd = _plain(config, late), _odd(config)
    actions = st.lists(st.one_of(plain, acts, odd), max_size=2).map(tuple)
    ticks = st.builds(
        Tick,
        before=actions,
        during=actions,
        model_last=st.booleans(),
        polls=st.integers(0, 2),
        fault=st.sampled_from([None] * 24 + FAULTS + ["failed"]),
        row=st.integers(0, config.max_rows - 1),
        masks=st.sampled_from([0, 0, 0, 0, 0, 1] if late else [1, 2, 0, 0]),
    )
    burst = Tick(before=draw(st.lists(plain, min_size=2, max_size=6).map(tuple)))
    chosen = [burst, *draw(st.lists(ticks, min_size=4, max_size=16))]
    ending = draw(st.sampled_from(["", "", "", "", "drain", "stop"]))
    if ending:
        chosen.append(Tick(before=(Act(ending, 0), draw(plain))))
    first, counted = draw(st.sampled_from([0, 0, 0, SEQUENCES - 3])), draw(st.sampled_from([0, 0, 1 << 32]))
    return Program(config, tuple(chosen), first, counted)


def run(program: Program, *, limit: int = 2000, **options: Any) -> Harness:
    """Runs a program to its end, with all checks or those of `options`; returns the harness.

    limit: steps within which everything must have ended once every front end behaves.
    """
    h = Harness(program.config, **options)
    h.attach()
    for front, views in zip(h.fronts, h.rings, strict=True):  # as if that many entries had been taken
        h.state["rings"]["sq_next"][front.index] = views["gpu"]["sq_head"] = front.sq_tail = program.first
    h.count_from(program.counted)
    for tick in program.ticks:
        perform(h, tick)
    wind_up(h, limit)
    return h


def wind_up(h: Harness, limit: int = 2000) -> None:
    """Every front end behaves again, and everything ends."""
    for front in h.fronts:
        front.withhold = front.silent = False
    h.boundary()
    h.run_model()
    h.poll()
    for front in h.fronts:
        front.consume()
    h.settle(limit)


def perform(h: Harness, tick: Tick) -> None:
    for front in h.fronts:
        front.renew()
    if tick.masks == 1:
        h.post_masks()
    for action in tick.before:
        act(h, action)
    launched = h.boundary()
    faults = {tick.row % max(1, h.n_rows): tick.fault} if tick.fault not in (None, "failed") else None
    if launched and not tick.model_last:
        h.run_model(faults, failed=tick.fault == "failed")
    if tick.masks == 2:
        h.post_masks()
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
    if action.what.startswith("mask"):
        spoil_mask(h, front, action)
    elif action.what == "cancel" and chosen:
        front.cancel(chosen)
    elif action.what == "duplicate" and chosen and front.acknowledged and front.sq_space() > len(front.live) + 1:
        front.publish(entry(front.sq_tail, Op.SUBMIT, chosen.slot, front.generation[chosen.slot]))
    elif action.what in ("withhold", "release"):
        front.withhold = action.what == "withhold"
    elif action.what in ("silence", "speak"):
        front.silent = action.what == "silence"
    elif action.what == "later":
        h.now += 2 * action.pick
    elif action.what == "earlier":
        h.now = max(0, h.now - 3)
    elif action.what == "bad_head":
        backwards, beyond = int(rs["cq_head"]) - 1 - action.pick, int(rs["cq_published"]) + 1 + action.pick
        front.views["front_end"]["cq_head"] = backwards if action.pick % 2 and backwards >= 0 else beyond
    elif action.what == "garbage":
        word = entry(front.sq_tail + 1 + action.pick, Op.SUBMIT, action.pick % 4, 1)
        front.views["sq"][front.sq_tail % h.config.sq_entries] = word
    elif action.what == "attach" and action.pick < 4:
        front.attach()
    elif action.what in ("drain", "stop"):
        h.control["control"][f"{action.what}_request"] = 1


def spoil_mask(h: Harness, front: FrontEnd, action: Act) -> None:
    """A mailbox with a wrong bit, with the mask of a later index, or with that of another generation."""
    needy = [x for x in front.live.values() if x.masked and x.refusal is None]
    if action.what == "mask_torn":  # what has been posted whole is not touched before it is used
        needy = [x for x in needy if not front.has_posted(x)]
    if not needy:
        return
    x = needy[action.pick % len(needy)]
    if action.what == "mask_torn":
        front.post_mask(x, torn=True)
        h.poll()
        return
    front.post_mask(x, index=len(x.tokens) + 1)
    if action.what == "mask_other":
        front.views["mask_boxes"]["ready"][int(x.descriptor["mask_box"])] += 1 << 40


def submit(h: Harness, front: FrontEnd, s: Submit) -> Submission | None:
    flags = int(s.ignore_eos) | SlotFlag.NO_PREFIX_CACHE * (not s.cache) | SlotFlag.MASKED * s.masked
    fields: dict[str, Any] = {"flags": flags, "seed": (s.length * 17 + s.max_tokens) * 0x1_0000_0001, "choice": s.token}
    fields |= {"temperature": 0.5 * s.token, "stop_ids": () if s.stop is None else (s.stop,), "top_k": s.token}
    fields |= {"priority": s.priority, "deadline_us": s.deadline, "logprobs": s.logprobs, "min_p": 0.25}
    fields |= {"min_tokens": min(s.min_tokens, s.max_tokens), "presence_penalty": -0.5, "frequency_penalty": 0.5}
    prompt = [(s.token + 3 * i) % VOCAB for i in range(s.length - 1)] + [s.token]
    corrupt = None if s.corruption is None else dict([CORRUPTIONS[s.corruption]])
    sealed = s.sealed or corrupt is None
    made = front.submit(prompt, s.max_tokens, corrupt=corrupt, sealed=sealed, bias=s.bias, **fields)
    if made is not None:
        made.refusal = deserved(h.config, made.descriptor, made.generation, front.views["arena"])
        if made.refusal not in (None, ErrorReason.DRAINING):
            h.situations.add(f"refused {made.refusal.name}")
    return made
