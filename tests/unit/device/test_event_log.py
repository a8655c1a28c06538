"""The event log: complete inputs, levels, overflow; and bursts that fill every slot (design section 4)."""

from __future__ import annotations

from collections import Counter

import pytest

from blink_core.abi.enums import ErrorReason, FinishReason, LogKind, LogLevel, SlotFlag
from tests.unit.device.scenarios import ERROR, FINISH, started, submit
from verification.scheduler import cache_invariants, invariants
from verification.scheduler.front_end import entry
from verification.scheduler.harness import VOCAB, Harness, next_token, small_config

DECISIONS = {
    *(LogKind.ACCEPT, LogKind.REJECT, LogKind.ADMIT, LogKind.PREEMPT, LogKind.FINISH, LogKind.ERROR, LogKind.CANCEL),
    *(LogKind.STEP, LogKind.EPOCH, LogKind.STATE, LogKind.PREFIX_HIT, LogKind.RESERVATION, LogKind.LEASE),
    LogKind.CONTROL,
}


def busy(level: LogLevel) -> Harness:
    """A history with every kind of input, on a small pool."""
    h = Harness(small_config(rings=2, pages=2 + 6, log_level=level, lease_us=15, slots=6, sq_entries=32, cq_entries=64))
    h.attach()
    one, two = h.fronts
    for i in range(5):
        submit(one, 6, 9, first=i % 2)
        made = two.submit([1, 2, 3], 4, flags=SlotFlag.MASKED | SlotFlag.IGNORE_EOS, deadline_us=200, logprobs=3)
        assert made is not None
        h.tick()
    one.cancel(next(iter(one.live.values())))
    for _ in range(20):
        h.tick()
    two.silent = True
    two.submit([5, 6, 7], 12, flags=1)
    for _ in range(10):
        h.tick()
    one.submit([VOCAB], 1, refusal=ErrorReason.BAD_TOKEN)
    two.silent = False
    h.settle()
    h.control["control"]["drain_request"] = 1
    h.tick()
    return h


def test_every_input_is_in_the_log() -> None:
    """Catches: an input that is acted on and not logged (each call looks), or a kind that this never reaches."""
    h = busy(LogLevel.ALL)
    seen = {LogKind(int(e["kind"])) for e in h.log[: int(h.state["header"]["log_tail"][0])]}
    assert set(LogKind) - seen <= {LogKind.PAGE_UNQUARANTINE, LogKind.RESERVATION}


def test_levels_of_the_log() -> None:
    """Catches: decisions that depend on how much of them is logged, or a level that logs what another should."""
    full, short, none = (busy(level) for level in (LogLevel.ALL, LogLevel.DECISIONS, LogLevel.OFF))
    assert int(none.state["header"]["log_tail"][0]) == 0
    kinds = {LogKind(int(e["kind"])) for e in short.log[: int(short.state["header"]["log_tail"][0])]}
    assert kinds <= DECISIONS
    assert [e.tobytes() for e in full.entries(*DECISIONS)] == [e.tobytes() for e in short.entries(*DECISIONS)]
    for h in (short, none):
        for ours, theirs in zip(h.rings, full.rings, strict=True):
            assert ours["cq"].tobytes() == theirs["cq"].tobytes()


@pytest.mark.parametrize("entries", [1, 2, 64])
def test_overflow_overwrites_the_oldest_and_is_counted(entries: int) -> None:
    """Catches: an index that stops or waits at the end of the log, or entries beyond it."""
    h = Harness(small_config(log_entries=entries))
    h.attach()
    made = [submit(h.fronts[0], 4, 6, first=i) for i in range(4)]
    h.settle()
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 6) for x in made)
    tail = int(h.state["header"]["log_tail"][0])
    assert tail > 64
    reference = Harness(small_config())
    reference.attach()
    for i in range(4):
        submit(reference.fronts[0], 4, 6, first=i)
    reference.settle()
    assert tail == int(reference.state["header"]["log_tail"][0])
    for at in range(tail - entries, tail):
        assert h.log[at % entries].tobytes() == reference.log[at].tobytes()


def burst(h: Harness, count: int) -> None:
    """Fills the slots of all rings before the scheduler looks, as far as `count` goes."""
    for i in range(count):
        front = h.fronts[i % len(h.fronts)]
        made = front.submit([1 + i % 7, i % VOCAB, 3], 2, flags=1, priority=i % 4)
        assert made is not None


def test_ten_thousand_requests_in_a_burst() -> None:
    """Catches: lists, credits or turns that break, or take for ever, with every slot of every ring alive at once."""
    fields = {"rings": 3, "slots": 4096, "sq_entries": 8192, "cq_entries": 8192, "max_rows": 256, "quantum": 64}
    fields |= {"token_budget": 1024, "pages": 2 + 300, "log_level": LogLevel.OFF, "max_bias": 0, "masks": 0}
    h = Harness(small_config(**fields), checks=False)
    h.attach()
    burst(h, 10_000)
    assert h.poll() == 10_000
    s = h.snapshot()
    assert s.header["live"] == 10_000
    invariants.check_all(s)
    bare_settle(h, 400)
    s = h.snapshot()
    invariants.check_all(s)
    cache_invariants.check_cache(s)
    invariants.check_idle(s)
    ends = Counter(x.terminal for x in h.history)
    assert ends == {(FINISH, FinishReason.LENGTH, 2): 10_000}


def bare_settle(h: Harness, limit: int) -> None:
    """Boundary, model and poll without the harness' checks of front-end memory, which is large here."""
    for _ in range(limit):
        launched = h.scheduler.boundary(h.now)
        if launched:
            answer(h)
        h.scheduler.poll(h.now)
        for ring, front in enumerate(h.fronts):
            h._listen(ring)
            front.consume()
        if not any(front.live for front in h.fronts):
            break
    h.scheduler.boundary(h.now)


def answer(h: Harness) -> None:
    """The scripted model's tokens, from the token pool."""
    rows = h.plan["rows"][: h.n_rows]
    tokens = h.state["tokens"].reshape(-1, h.config.max_len)
    for i, row in enumerate(rows):
        if row["sample"]:
            context = tokens[int(row["request"])][: int(row["context_len"])].tolist()
            h.plan["results"][i] = (next_token(context), -0.5, 0, 0)


def test_slot_exhaustion() -> None:
    """Catches: a submission into a busy slot that overwrites its request, or that costs another its credit."""
    h, front = started(slots=4, sq_entries=64, cq_entries=32, max_rows=2)
    live = [submit(front, 3, 6, first=i) for i in range(4)]
    h.tick()
    assert not front.free
    extra = []
    for i in range(6):  # a front end that does not honour its slots
        front.free.append(i % 4)
        made = front.submit([1, 2], 3, flags=1, refusal=ErrorReason.SLOT_BUSY)
        assert made is not None
        extra.append(made)
        h.tick()
        front.live.pop((made.slot, made.generation), None)
    front.free.clear()
    assert [x.terminal for x in extra] == [(ERROR, ErrorReason.SLOT_BUSY, 0)] * 6
    for _ in range(60):
        h.tick()
    assert [x.terminal for x in live] == [(FINISH, FinishReason.LENGTH, 6)] * 4


def test_refusals_without_credits_wait() -> None:
    """Catches: a flood of malformed entries from a front end that reads nothing, written over its own events."""
    h = Harness(small_config(rings=2, slots=4, sq_entries=64, cq_entries=8, max_rows=2))
    h.attach()
    flood, other = h.fronts
    flood.withhold = True
    for i in range(20):
        h.strays.add((0, 1, 100 + i))
        flood.publish(entry(flood.sq_tail, 9, 1, 100 + i))
        h.tick()
    assert int(h.rings[0]["gpu"]["sq_head"][0]) == int(h.rings[0]["gpu"]["cq_tail"][0]) == 8
    x = submit(other, 3, 4)
    h.settle_only(other)
    assert x.terminal == (FINISH, FinishReason.LENGTH, 4)
    flood.withhold = False
    for _ in range(4):
        h.tick()
    assert int(h.rings[0]["gpu"]["cq_tail"][0]) == 20
