"""The checker of order of service between rings and classes, on hand-made logs, good and bad."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import DTYPES, LOG_ENTRY, REQUEST
from blink_core.abi.enums import ErrorReason, FinishReason, LogKind
from blink_core.abi.params import SamplingParams
from hil_rigs.engine_memory import StateSnapshot
from verification.history import History, Submitted
from verification.program import Program, RequestSpec
from verification.properties.service_order import PROPERTY, check_contested, check_service
from verification.result import CheckResult, Measurement, Verdict

pytestmark = pytest.mark.usefixtures("well_formed")
CONFIG = EngineConfig(
    vocab=64, rings=3, slots=8, sq_entries=16, cq_entries=64, arena_tokens=64, max_len=64, max_rows=2, token_budget=8,
    pages=34, quantum=8, reservation_steps=3, lease_us=1000,
)  # fmt: skip
Entry = tuple[int, int, int, int, int, int]  # kind, ring, slot, a, b, c


def snapshot(entries: Iterable[Entry] = (), *, config: EngineConfig = CONFIG, lost: int = 0) -> StateSnapshot:
    """An idle engine; the log holds `entries`, all of generation 1."""
    rows = list(entries)
    log = np.zeros(len(rows), LOG_ENTRY)
    for record, (kind, ring, slot, a, b, c) in zip(log, rows, strict=True):
        record["kind"], record["ring"], record["slot"], record["generation"] = kind, ring, slot, 1
        record["a"], record["b"], record["c"] = a, b, c
    header = np.zeros(1, DTYPES["StateHeader"])[0]
    header["log_tail"] = lost + len(log)
    empty = np.zeros(0, np.uint32)
    return StateSnapshot(
        config=config, header=header, rings=np.zeros(3, DTYPES["RingState"]), requests=np.zeros(24, REQUEST),
        running=empty, block_tables=empty, pages=empty, free_list=empty, quarantine=empty, log=log, log_lost=lost,
    )  # fmt: skip


def history(ring: int, *costs: int, priority: int = 0, deadline_us: int = 0, logprobs: int = 0) -> History:
    """Requests in slots 0, 1 ... of a ring, of these costs, each with one output token."""
    params = SamplingParams(1, priority=priority, deadline_us=deadline_us, logprobs=logprobs)
    specs = tuple(RequestSpec((1,) * (cost - 1), params) for cost in costs)
    return History(Program(specs), ring, [Submitted(i, i, 1, i) for i in range(len(costs))], complete=True)


def accept(ring: int, slot: int = 0) -> Entry:
    return (LogKind.ACCEPT, ring, slot, 1, 1, slot)


def admit(ring: int, slot: int = 0, preemptions: int = 0) -> Entry:
    return (LogKind.ADMIT, ring, slot, 0, 1, preemptions)


def preempt(ring: int, slot: int = 0) -> Entry:
    return (LogKind.PREEMPT, ring, slot, 0, 1, 1)


def reserve(what: int, ring: int, slot: int = 0, held: int = 0) -> Entry:
    return (LogKind.RESERVATION, ring, slot, what, held, 0)


def clock(now: int) -> Entry:
    return (LogKind.CLOCK, 0, 0, now, 0, 0)


def lost_lease(ring: int, slot: int = 0) -> Entry:
    return (LogKind.ERROR, ring, slot, ErrorReason.LEASE_LOST, 0, 0)


STEP: Entry = (LogKind.STEP, 0, 0, 1, 4, 1)
FULL: Entry = (LogKind.STEP, 0, 0, 1, 8, 1)


def end(ring: int, slot: int = 0, reason: int = FinishReason.LENGTH) -> Entry:
    return (LogKind.FINISH, ring, slot, reason, 1, 1)


def check(entries: Iterable[Entry], *histories: History, config: EngineConfig = CONFIG) -> CheckResult:
    return check_service(snapshot(config=config), snapshot(entries, config=config), histories)


def verdict(entries: Iterable[Entry], *histories: History, config: EngineConfig = CONFIG) -> str:
    result = check(entries, *histories, config=config)
    return result.clause if result.verdict is Verdict.INVALID else result.verdict.value


def test_first_come_first_served_in_a_ring_and_class() -> None:
    """Catches: a younger request admitted first; one admitted twice; a resumed request that has lost its age."""
    h = history(1, 4, 4, 4)
    taken = [accept(1, i) for i in range(3)]
    assert verdict([*taken, admit(1, 0), admit(1, 1), admit(1, 2)], h) == "valid"
    assert verdict([*taken, admit(1, 1)], h) == "fifo"
    assert verdict([*taken, admit(1, 0), admit(1, 0)], h) == "fifo"
    assert verdict([*taken, admit(1, 0), preempt(1, 0), STEP, admit(1, 0, 1), admit(1, 1)], h) == "valid"
    assert verdict([*taken, admit(1, 0), preempt(1, 0), STEP, admit(1, 1)], h) == "fifo"
    assert verdict([*taken, admit(1, 0), preempt(1, 0), admit(1, 1)], h) == "valid", "it gave way for this one"
    assert verdict([*taken, end(1, 0, FinishReason.CANCELLED), admit(1, 1)], h) == "valid"


def test_who_sleeps_is_not_the_next() -> None:
    """Catches: a request that is admitted again without its mask, or another one before it when the mask is there; a
    sleeper for which those behind it are called overtakers."""
    plain = history(1, 4, 4)
    first, second = plain.program.requests
    h = replace(plain, program=Program((replace(first, mask_seed=1), second)))
    mask, gone = (LogKind.MASK, 1, 0, 0, 0, 0), [accept(1, 0), admit(1, 0), preempt(1, 0), STEP, accept(1, 1)]
    assert verdict([*gone, admit(1, 1)], h) == "valid"
    assert verdict([*gone, admit(1, 1)], plain) == "fifo"
    assert verdict([*gone, admit(1, 0, 1)], h) == "fifo"
    assert verdict([*gone, mask, admit(1, 0, 1), admit(1, 1)], h) == "valid"
    assert verdict([*gone, mask, admit(1, 1)], h) == "fifo"
    again = [mask, admit(1, 0, 1), mask, (LogKind.TOKEN, 1, 0, 0, 5, 0), preempt(1, 0), STEP]
    assert verdict([*gone, *again, admit(1, 0, 2)], h) == "fifo", "that mask was for the token before"
    assert verdict([*gone, *again, admit(1, 1)], h) == "valid"


def test_urgent_classes_first() -> None:
    """Catches: a request admitted before a more urgent one of its own or another ring."""
    urgent, common = history(0, 4), history(1, 4, priority=2)
    taken = [accept(1), accept(0)]
    assert verdict([*taken, admit(0), admit(1)], urgent, common) == "valid"
    assert verdict([*taken, admit(1), admit(0)], urgent, common) == "class-order"
    assert verdict([accept(1), admit(1), accept(0), admit(0)], urgent, common) == "valid"
    preempted = [*taken, admit(0), preempt(0)]
    assert verdict([*preempted, admit(1)], urgent, common) == "valid"
    assert verdict([*preempted, STEP, admit(1)], urgent, common) == "class-order"
    assert verdict([*taken, (LogKind.EPOCH, 0, 0, 2, 1, 0), admit(1)], urgent, common) == "valid"


def test_a_ring_short_of_credits_claims_nothing() -> None:
    """Catches: a slow front end's own pause taken for unfair service."""
    urgent, common = history(0, 4), history(1, 4, priority=2)
    tokens: list[Entry] = [(LogKind.TOKEN, 0, 0, 0, 0, 0)] * 60
    assert verdict([accept(1), accept(0), *tokens, admit(1)], urgent, common) == "valid"
    returned: Entry = (LogKind.CREDITS, 0, 0, 60, 0, 0)
    assert verdict([accept(1), accept(0), *tokens, returned, admit(1)], urgent, common) == "class-order"


def test_a_token_with_alternatives_takes_many_credits() -> None:
    """Catches: pauses for want of credits taken for unfair service where a token comes with log probabilities."""
    urgent, common = history(0, 4, logprobs=20), history(1, 4, priority=2)  # 11 events a token
    token: Entry = (LogKind.TOKEN, 0, 0, 0, 0, 0)
    taken = [accept(1), accept(0)]
    assert verdict([*taken, token, token, admit(1)], urgent, common) == "class-order"
    assert verdict([*taken, token, token, token, admit(1)], urgent, common) == "valid", "33 + 3 rows of 11 + 8 of 64"


def alternate(first: int, second: int, count: int) -> list[Entry]:
    return [admit(ring, slot) for slot in range(count) for ring in (first, second)]


def test_rings_share_by_tokens() -> None:
    """Catches: a ring that is served more often than its share of tokens, in requests or in size."""
    a, b = history(0, *[8] * 8), history(1, *[8] * 8)
    taken = [accept(ring, slot) for slot in range(8) for ring in (0, 1)]
    fair = check([*taken, *alternate(0, 1, 8)], a, b)
    assert fair.ok()
    enough = check_contested([fair], 10)
    counted = fair.measurements["contested_admissions"].value
    assert enough.ok()
    assert enough.measurements == {"contested_admissions": Measurement(counted, "requests", 10, limit_is="min")}
    assert check_contested([fair], 1000).verdict is Verdict.UNKNOWN
    greedy = [*taken, *[admit(0, slot) for slot in range(8)]]
    assert verdict(greedy, a, b) == "fairness"
    late = [*taken, *alternate(0, 1, 2), *[admit(1, slot) for slot in range(2, 7)]]
    assert verdict(late, a, b) == "fairness"
    alone = [*[accept(0, slot) for slot in range(8)], *[admit(0, slot) for slot in range(7)], accept(1), admit(1)]
    assert verdict(alone, a, b) == "valid", "nobody competed"
    assert check_contested([check(alone, a, b)], 1).verdict is Verdict.UNKNOWN


def test_the_next_of_a_ring_is_not_passed_over_for_ever() -> None:
    """Catches: rings that take turns at the cost of a third, which no pair of them shows."""
    a, b, c = history(0, *[4] * 8), history(1, *[4] * 8), history(2, 32)
    sparse: list[Entry] = [accept(2)]
    for slot in range(8):  # never two waiting of ring 0, so that its race with ring 2 begins anew each time
        sparse += [accept(0, slot), admit(0, slot)]
    assert verdict(sparse, a, b, c) == "valid", "32 tokens take 4 turns"
    small = replace(CONFIG, quantum=1)
    assert verdict(sparse, a, b, c, config=small) == "valid"
    short = history(2, 4)
    assert verdict(sparse, a, b, short, config=small) == "bounded-wait"


def test_a_wait_before_the_first_admission_does_not_count_for_a_later_one() -> None:
    """Catches: a false alarm, of a request that waited twice (seen in profile smoke, seed 202); a second wait that
    nothing bounds."""
    a, c = history(0, *[4] * 8), history(2, 8)
    one_by_one = [entry for slot in range(8) for entry in (accept(0, slot), admit(0, slot))]

    def waits(first: int) -> list[Entry]:
        return [accept(2), *one_by_one[: 2 * first], admit(2), preempt(2), *one_by_one[2 * first :]]

    assert verdict(waits(4), a, c) == "valid", "16 tokens each time, of at most 32 and 24"
    assert verdict(waits(1), a, c) == "bounded-wait", "28 tokens the second time"


def test_reservation() -> None:
    """Catches: a head that does not fit and is passed by, or that stops everybody for longer than it may."""
    a, b, low = history(0, 8, 8), history(1, 8), history(2, 8, priority=1)
    taken = [accept(0, 0), accept(0, 1), accept(1), accept(2), admit(0, 0)]
    held = [*taken, reserve(1, 1)]
    assert verdict([*held, STEP, STEP, reserve(0, 1), admit(1), admit(0, 1), admit(2)], a, b, low) == "valid"
    assert verdict([*held, STEP, admit(0, 1)], a, b, low) == "reservation"
    assert verdict([*held, STEP, STEP, STEP, reserve(0, 1, held=3), admit(0, 1)], a, b, low) == "valid", "given up"
    assert verdict([*held, *[STEP] * 4], a, b, low) == "reservation"
    given_up = [*held, STEP, STEP, STEP, reserve(0, 1, held=3)]
    assert verdict([*given_up, admit(2)], a, b, low) == "valid", "at that boundary whoever fits goes, of any class"
    assert verdict([*given_up, STEP, admit(2)], a, b, low) == "class-order"
    assert verdict([*held, STEP, reserve(0, 1, held=1), admit(2)], a, b, low) == "class-order", "not held for so long"
    assert verdict([*held, *[FULL] * 9, STEP], a, b, low) == "valid", "no token was left for it"
    urgent = history(2, 8)
    assert verdict([*taken[:3], admit(0, 0), reserve(1, 1), accept(2), admit(2)], a, b, urgent) == "reservation"
    many, head, other = history(0, *[8] * 4), history(1, 8), history(2, 8, priority=1)
    served = [*[accept(0, i) for i in range(4)], accept(1), accept(2), admit(0, 0), admit(0, 1)]
    steps, rest = [STEP, STEP, STEP], [STEP, admit(0, 2), admit(0, 3)]
    given_up = [*served, reserve(1, 1), *steps, reserve(0, 1, held=3), *rest]
    assert verdict(given_up, many, head, other) == "valid", "what its class was charged before does not count"
    elsewhere = [*served, reserve(1, 2), *steps, reserve(0, 2, held=3), *rest]
    assert verdict(elsewhere, many, head, other) == "fairness", "of another class it changes nothing"
    waiting_low = history(1, 8, priority=1)
    passed = [accept(1), reserve(1, 1), accept(2), admit(2)]
    assert verdict(passed, waiting_low, urgent) == "valid", "a more urgent one does not wait for it"


def test_deadlines() -> None:
    """Catches: a request that ends before its deadline, or is computed after it."""
    h = history(0, 4, deadline_us=100)
    taken = [clock(1000), accept(0), admit(0), clock(1099), (LogKind.PLAN_ROW, 0, 0, 4, 4, 0)]
    over: Entry = (LogKind.ERROR, 0, 0, ErrorReason.DEADLINE, 0, 0)
    assert verdict([*taken, clock(1100), over], h) == "valid"
    assert verdict([*taken, over], h) == "deadline"
    assert check([*taken, over], h).message.endswith("ended at clock 1099, its deadline is 1100")
    assert verdict([*taken, clock(1100), taken[-1]], h) == "deadline"
    assert verdict([*taken, clock(1100), over], history(0, 4)) == "deadline", "it has none"


def test_leases() -> None:
    """Catches: a lease lost under a front end that speaks, requests dropped without a lapse, or counted wrong; a lapse
    that ended nobody."""
    h = history(0, 4, 4)
    entry: Entry = (LogKind.SQ_ENTRY, 0, 0, 0, 0, 0)
    taken = [clock(5000), entry, accept(0), entry, accept(0, 1), admit(0)]
    lapse: Entry = (LogKind.LEASE, 0, 0, 1, 2, 0)
    both = [lost_lease(0), lost_lease(0, 1)]
    assert verdict([*taken, clock(6000), *both, lapse], h) == "valid"
    assert verdict([*taken, clock(6000), *both, lapse, (LogKind.LEASE, 0, 0, 0, 0, 0)], h) == "valid"
    assert verdict([*taken, clock(5999), *both, lapse], h) == "lease"
    assert verdict([*taken, clock(6000), both[0], lapse], h) == "lease"
    assert "counts 2 requests, 0 ended" in check([*taken, clock(6000), lapse], h).message
    nobody, one = ((LogKind.LEASE, 0, 0, 1, ended, 0) for ended in (0, 1))
    assert verdict([*taken[:3], admit(0), clock(6000), both[0], one], h) == "valid"
    assert verdict([*taken, clock(6000), nobody], h) == "lease", "only a ring with live requests has a lapse"
    assert verdict([*taken, clock(6000), *both], h) == "lease"
    never = replace(CONFIG, lease_us=0)
    assert verdict([*taken, clock(60000), *both, lapse], h, config=never) == "lease"


def test_each_figure_has_its_value_unit_limit_and_number() -> None:
    """Catches: a figure of the report that is wrong, in another unit, under no limit or another, or of other rows."""
    a, b = history(0, 4, 4), history(1, 6)
    entries = [accept(0), accept(0, 1), accept(1), admit(0), admit(1), admit(0, 1)]
    result = check(entries, a, b)
    assert result.verdict is Verdict.VALID
    assert result.measurements == {
        "admissions": Measurement(3, "requests"),
        "contested_admissions": Measurement(1, "requests"),  # both rings waited and each had been charged
        "charge_spread": Measurement(6, "tokens", CONFIG.quantum + 2 * 6, 1),  # from 4 ahead to 2 behind
        "overtaken": Measurement(6, "tokens"),
    }


def test_nothing_to_judge_is_unknown() -> None:
    """Catches: a pass where entries were overwritten, of requests that nobody told of, or with nobody admitted."""
    h = history(0, 4)
    assert {check([accept(0)], h).property, check([accept(0), admit(0)]).property} == {PROPERTY}
    gap = check_service(snapshot(), snapshot([accept(0), admit(0)], lost=5), [h])
    assert (gap.verdict, gap.witness) == (Verdict.UNKNOWN, {"gap": 5})
    assert verdict([accept(0), admit(0), accept(1)], h) == "unknown"
    assert verdict([accept(0)], h) == "unknown"
    assert verdict([], h) == "unknown"
    busy = snapshot()
    busy.header["live"] = 1
    assert check_service(busy, snapshot([accept(0), admit(0)]), [h]).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("kind", [900, LogKind.ADMIT, LogKind.FINISH, LogKind.TOKEN, LogKind.CREDITS])
def test_garbage_is_no_exception(kind: int) -> None:
    """Catches: an exception where the log names rings, slots or kinds that do not exist."""
    h = history(0, 4)
    entries: list[Entry] = [accept(0), admit(0), (kind, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF)]
    assert verdict(entries, h) == ("valid" if kind == 900 else "fifo")
