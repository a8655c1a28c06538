"""Who is served when, by the event log (level ALL): the clauses of `queue_ordering` that span rings (design section 4).

Clauses:
  fifo          within ring and class, whoever is admitted is the oldest that waits and is not asleep: it ran before and
                lacks the mask of its next token
  class-order   nobody is admitted while a more urgent request waits, but at the boundary that gives a reservation up
  reservation   while a request that does not fit holds the reservation, nobody of its class or below is admitted before
                it; it is held for at most Config.reservation_steps steps that had tokens left
  fairness      rings that compete for a class are charged, prompt and max_tokens once a request, within
                quantum + 2 * greatest cost of each other, whenever one looks (Shreedhar and Varghese, SIGCOMM 1995)
  bounded-wait  while a request is the next of its ring and class, another ring is charged at most what it may be until
                the request's ring has had the turns that its cost needs
  deadline      nothing is planned for a request past its deadline, and none ends with DEADLINE before
  lease         requests end with LEASE_LOST only after a lease time without a submission entry, all in one lapse

A ring that may be short of completion-queue credits claims nothing: its rows and its turns wait for its front end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import LOGPROBS_PER_EVENT
from blink_core.abi.enums import ErrorReason, LogKind
from hil_rigs.engine_memory import StateSnapshot
from verification.history import History
from verification.program import RequestSpec
from verification.result import CheckResult, Measurement, Verdict

PROPERTY = "queue-ordering"
Key = tuple[int, int, int]  # ring, slot, generation


class _Broken(Exception):
    def __init__(self, clause: str, message: str) -> None:
        super().__init__(message)
        self.clause = clause


@dataclass(eq=False)
class _Waiter:
    """A request that lives. overtaken: tokens charged to each other ring since it is the next of its ring and class."""

    key: Key
    priority: int
    cost: int
    age: int
    expires: int | None
    masked: bool = False
    tokens: int = 0
    mask: int = -1  # output index of the newest mask that the engine found
    admitted: bool = False
    overtaken: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def asleep(self) -> bool:
        return self.admitted and self.masked and self.mask != self.tokens

    def __str__(self) -> str:
        return "ring {}, slot {}, generation {}".format(*self.key)


@dataclass
class _Race:
    """Charges of one ring less those of another while both wait in a class: now, and the extremes so far."""

    now: int = 0
    low: int = 0
    high: int = 0
    sides: set[int] = field(default_factory=set)


class _Service:
    """The fold over the log. `first` is a snapshot in which nothing lives."""

    def __init__(self, first: StateSnapshot, specs: dict[Key, RequestSpec]) -> None:
        self.config, self.specs = first.config, specs
        self.clock = int(first.header["logged_clock"])
        self.alive: dict[Key, _Waiter] = {}
        self.waiting: dict[tuple[int, int], list[_Waiter]] = defaultdict(list)
        self.races: dict[tuple[int, int, int], _Race] = defaultdict(_Race)
        self.tails = [int(r["cq_tail"]) for r in first.rings]
        self.heads = [int(r["cq_head"]) for r in first.rings]
        self.spoke = [int(r["lease_at"]) for r in first.rings]  # clock of each ring's last submission entry, or later
        self.lost: dict[int, int] = defaultdict(int)
        self.gave_way: set[Key] = set()
        self.given_up = False  # a reservation, since the last step: at that boundary whoever fits goes
        self.holder: _Waiter | None = None
        self.held_steps = 0
        self.unknown = 0
        self.greatest = max((self.cost(s) for s in specs.values()), default=0)
        self.widest = max((1 + -(-s.params.logprobs // LOGPROBS_PER_EVENT) for s in specs.values()), default=1)
        self.spread = self.waited = self.contested = self.admissions = self.arrivals = 0

    # ---- what the scheduler's rules are about

    def cost(self, spec: RequestSpec) -> int:
        return min(len(spec.prompt) + spec.params.max_tokens, self.config.max_len)

    def need(self, ok: bool, clause: str, message: str) -> None:
        if not ok:
            raise _Broken(clause, message)

    def short(self, ring: int) -> bool:
        """Whether a ring may lack credits: by the most events that what is planned can make."""
        most = self.tails[ring] - self.heads[ring] + (self.config.max_rows + 1) * self.widest + self.config.slots
        return most > self.config.cq_entries

    def next_of(self, ring: int, priority: int) -> _Waiter | None:
        """Who is next of ring and class, unless the ring may be short of credits."""
        line = (w for w in self.waiting.get((ring, priority), []) if not w.asleep)
        return None if self.short(ring) else next(line, None)

    def spoken(self, ring: int, events: int) -> None:
        self.tails[ring] += events
        if self.short(ring):
            self.forget_races(lambda a, b, _: ring in (a, b))
            self.forget_waits(lambda w: w.key[0] == ring)

    def forget_races(self, which: Callable[[int, int, int], bool]) -> None:
        """Comparisons of these rings and classes begin anew."""
        for race in [r for r in self.races if which(*r)]:
            del self.races[race]

    def forget_waits(self, which: Callable[[_Waiter], bool]) -> None:
        for waiter in self.alive.values():
            if which(waiter):
                waiter.overtaken.clear()

    def queue(self, waiter: _Waiter) -> None:
        line = self.waiting[waiter.key[0], waiter.priority]
        line.append(waiter)
        line.sort(key=lambda w: w.age)
        for behind in line[1:]:
            behind.overtaken.clear()

    def leave(self, waiter: _Waiter) -> None:
        place = waiter.key[0], waiter.priority
        if waiter in self.waiting[place]:
            self.waiting[place].remove(waiter)
            self.drop_out(*place)

    def drop_out(self, ring: int, priority: int) -> None:
        """A ring competes for a class no longer, if nobody of it does."""
        if all(w.asleep for w in self.waiting[ring, priority]):
            self.forget_races(lambda a, b, p: ring in (a, b) and p == priority)

    # ---- entries; each method gets the key, a, b and c

    def accept(self, key: Key, *_: int) -> None:
        spec = self.specs.get(key)
        if spec is None:
            self.unknown += 1
            return
        expires = self.clock + spec.params.deadline_us if spec.params.deadline_us else None
        masked = spec.mask_seed is not None
        made = _Waiter(key, spec.params.priority, self.cost(spec), self.arrivals, expires, masked)
        self.arrivals += 1
        self.alive[key] = made
        self.queue(made)

    def admit(self, key: Key, *_: int) -> None:
        x = self.alive.get(key)
        if x is None:
            return
        self.admissions += 1
        for priority in range(x.priority):
            for ring in range(self.config.rings):
                urgent = self.next_of(ring, priority)
                ok = urgent is None or urgent.key in self.gave_way or self.given_up
                self.need(
                    ok, "class-order", f"{x} of class {x.priority} was admitted while {urgent} of {priority} waited"
                )
        self.need(not x.asleep, "fifo", f"{x} was admitted again without the mask of its next token")
        line = [w for w in self.waiting[key[0], x.priority] if w is x or (w.key not in self.gave_way and not w.asleep)]
        self.need(bool(line) and line[0] is x, "fifo", f"{x} was admitted, {line[0] if line else 'nobody'} is older")
        h = self.holder
        if h is not None and h is not x and x.priority >= h.priority and self.next_of(h.key[0], h.priority) is h:
            raise _Broken("reservation", f"{x} was admitted while {h} held the reservation")
        if not x.admitted:
            self._charge(x)
            x.admitted = True
        x.overtaken.clear()  # should it give way, its next wait counts by itself
        x.mask = -1
        self.leave(x)

    def _charge(self, x: _Waiter) -> None:
        """Clauses fairness and bounded-wait at a first admission."""
        quantum, ours = self.config.quantum, x.key[0]
        for a, b in combinations(range(self.config.rings), 2):
            if ours not in (a, b) or self.next_of(a, x.priority) is None or self.next_of(b, x.priority) is None:
                continue
            race = self.races[a, b, x.priority]
            race.now += x.cost if ours == a else -x.cost
            race.low, race.high = min(race.low, race.now), max(race.high, race.now)
            race.sides.add(ours)
            self.contested += len(race.sides) == 2
            spread, most = race.high - race.low, quantum + 2 * self.greatest
            self.spread = max(self.spread, spread)
            self.need(
                spread <= most,
                "fairness",
                f"rings {a} and {b} competed for class {x.priority} and were charged {spread} tokens apart, "
                f"at most {most} is fair",
            )
        for ring in range(self.config.rings):
            w = self.next_of(ring, x.priority)
            if ring == ours or w is None:
                continue
            w.overtaken[ours] += x.cost
            turns = (0 if w.admitted else -(-w.cost // quantum)) + 1
            most = turns * quantum + 2 * self.greatest
            self.waited = max(self.waited, w.overtaken[ours])
            self.need(
                w.overtaken[ours] <= most,
                "bounded-wait",
                f"{w} of {w.cost} tokens was next of its ring, and ring {ours} was charged {w.overtaken[ours]} tokens "
                f"meanwhile, at most {most} may be",
            )

    def preempt(self, key: Key, *_: int) -> None:
        if key in self.alive:
            x = self.alive[key]
            self.queue(x)
            self.gave_way.add(key)
            self.drop_out(key[0], x.priority)

    def mask(self, key: Key, index: int, *_: int) -> None:
        x = self.alive.get(key)
        if x is None:
            return
        woken, x.mask = x.asleep, index
        line = self.waiting[key[0], x.priority]
        if woken and x in line:  # those behind it are not the next any more
            for behind in line[line.index(x) + 1 :]:
                behind.overtaken.clear()

    def over(self, key: Key, *_: int) -> None:
        self.spoken(key[0], 1)
        waiter = self.alive.pop(key, None)
        if waiter is not None:
            self.leave(waiter)
            if self.holder is waiter:
                self.holder = None

    def error(self, key: Key, reason: int, b: int, c: int) -> None:
        waiter = self.alive.get(key)
        if reason == ErrorReason.DEADLINE and waiter is not None:
            ok = waiter.expires is not None and self.clock >= waiter.expires
            due = waiter.expires or "not set"
            self.need(ok, "deadline", f"{waiter} ended at clock {self.clock}, its deadline is {due}")
        if reason == ErrorReason.LEASE_LOST:
            ring, idle = key[0], self.clock - self.spoke[key[0]]
            lease = self.config.lease_us
            self.need(0 < lease <= idle, "lease", f"ring {ring} lost its lease of {lease} us {idle} us after an entry")
            self.lost[ring] += 1
        self.over(key)

    def lease(self, key: Key, lapsed: int, ended: int, _: int) -> None:
        if lapsed:  # which only a ring with live requests can (L4)
            ring, found = key[0], self.lost.pop(key[0], 0)
            self.need(
                0 < found == ended, "lease", f"ring {ring}: a lapse counts {ended} requests, {found} ended with it"
            )

    def epoch(self, key: Key, *_: int) -> None:
        for waiter in [w for w in self.alive.values() if w.key[0] == key[0]]:
            self.over(waiter.key)
        self.tails[key[0]] = self.heads[key[0]] = 0

    def reservation(self, key: Key, what: int, boundaries: int, _: int) -> None:
        waiter = self.alive.get(key)
        if what == 1:
            self.holder, self.held_steps = waiter, 0
        elif what == 0:
            self.holder = None
            if waiter is not None and boundaries >= self.config.reservation_steps:  # perhaps given up
                self.given_up = True
                mine = waiter.priority
                self.forget_races(lambda _, __, p: p == mine)
                self.forget_waits(lambda w: w.priority == mine)

    def step(self, _: Key, __: int, tokens: int, ___: int) -> None:
        self.gave_way.clear()
        self.given_up = False
        h = self.holder
        if h is None or tokens >= self.config.token_budget or self.next_of(h.key[0], h.priority) is not h:
            return
        self.held_steps += 1
        most = self.config.reservation_steps
        self.need(
            self.held_steps <= most, "reservation", f"{h} held the reservation over {self.held_steps} steps of {most}"
        )

    def plan_row(self, key: Key, *_: int) -> None:
        waiter = self.alive.get(key)
        if waiter is not None and waiter.expires is not None:
            ok = self.clock < waiter.expires
            self.need(ok, "deadline", f"{waiter} was planned at clock {self.clock}, its deadline is {waiter.expires}")

    def token(self, key: Key, index: int, *_: int) -> None:
        self.spoken(key[0], self.widest)
        if key in self.alive:
            self.alive[key].tokens = index + 1

    def reject(self, key: Key, *_: int) -> None:
        self.spoken(key[0], 1)

    def credits(self, key: Key, low: int, high: int, _: int) -> None:
        self.heads[key[0]] = high << 32 | low

    def set_clock(self, _: Key, low: int, high: int, __: int) -> None:
        self.clock = high << 32 | low

    def entry(self, key: Key, *_: int) -> None:
        self.spoke[key[0]] = self.clock

    def handlers(self) -> dict[int, Callable[[Key, int, int, int], None]]:
        return {
            LogKind.ACCEPT: self.accept,
            LogKind.REJECT: self.reject,
            LogKind.ADMIT: self.admit,
            LogKind.PREEMPT: self.preempt,
            LogKind.FINISH: self.over,
            LogKind.ERROR: self.error,
            LogKind.STEP: self.step,
            LogKind.TOKEN: self.token,
            LogKind.MASK: self.mask,
            LogKind.PLAN_ROW: self.plan_row,
            LogKind.EPOCH: self.epoch,
            LogKind.RESERVATION: self.reservation,
            LogKind.LEASE: self.lease,
            LogKind.CLOCK: self.set_clock,
            LogKind.CREDITS: self.credits,
            LogKind.SQ_ENTRY: self.entry,
        }


def _result(verdict: Verdict, clause: str, message: str, **witness: int) -> CheckResult:
    return CheckResult(verdict, PROPERTY, clause, message, dict(witness))


def check_service(before: StateSnapshot, after: StateSnapshot, histories: Sequence[History]) -> CheckResult:
    """All clauses, over what happened between two snapshots. histories: one of each ring that had requests.

    Unknown when requests lived before, entries were overwritten, a request is in no history, or nobody was admitted.
    """
    start = int(before.header["log_tail"])
    if after.log_lost > start:
        lost = after.log_lost - start
        return _result(Verdict.UNKNOWN, "fifo", f"{lost} event-log entries were overwritten", gap=lost)
    if int(before.header["live"]):
        return _result(Verdict.UNKNOWN, "fifo", f"{int(before.header['live'])} requests lived before the log began")
    specs = {
        (history.ring, s.slot, s.generation): history.program.requests[s.request]
        for history in histories
        for s in history.submitted
    }
    service, log = _Service(before, specs), after.log[start - after.log_lost :]
    handlers = service.handlers()
    names = ("kind", "ring", "slot", "generation", "a", "b", "c")
    for at, (kind, ring, slot, generation, a, b, c) in enumerate(
        zip(*(log[name].tolist() for name in names), strict=True)
    ):
        if (handler := handlers.get(kind)) is None:
            continue
        if ring >= before.config.rings:
            return _result(Verdict.INVALID, "fifo", f"entry {at} of the log names ring {ring}", entry=at)
        try:
            handler((ring, slot, generation), a, b, c)
        except _Broken as e:
            return _result(Verdict.INVALID, e.clause, str(e), entry=at)
    return _judge(service, before.config)


def _judge(service: _Service, config: EngineConfig) -> CheckResult:
    if service.lost:
        return _result(Verdict.INVALID, "lease", f"requests of rings {sorted(service.lost)} ended without a lapse")
    if service.unknown:
        return _result(Verdict.UNKNOWN, "fifo", f"{service.unknown} accepted requests are in no history")
    if service.admissions == 0:
        return _result(Verdict.UNKNOWN, "fifo", "no request was admitted: there is no order to judge")
    fair = config.quantum + 2 * service.greatest
    measured = {
        "admissions": Measurement(service.admissions, "requests"),
        "contested_admissions": Measurement(service.contested, "requests"),
        "charge_spread": Measurement(service.spread, "tokens", fair, service.contested),
        "overtaken": Measurement(service.waited, "tokens"),
    }
    message = (
        f"{service.admissions} admissions in order of service, {service.contested} of them contested between rings"
    )
    return CheckResult(Verdict.VALID, PROPERTY, "fifo", message, {}, measured)


def check_contested(results: Sequence[CheckResult], fewest: int) -> CheckResult:
    """Whether rings competed at all: unknown below `fewest` admissions for which two rings waited in one class."""
    found = sum(int(r.measurements["contested_admissions"].value) for r in results if r.ok())
    verdict = Verdict.VALID if found >= fewest else Verdict.UNKNOWN
    measured = {"contested_admissions": Measurement(found, "requests", fewest, limit_is="min")}
    return CheckResult(verdict, PROPERTY, "fairness", f"{found} admissions were contested", {}, measured)
