"""Draws legal histories: a ring with its two queues, several clients and one poller, in a random interleaving.

Nothing here knows the specification's laws: entries are published at some moment of their call, the engine takes them
in order, and events come out in order. What the clients saw is legal by construction, with calls that overlap, calls of
unknown outcome, slots in reuse, entries for a busy slot, cancels that come late, lapses, drains, stops and new epochs.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

from verification.linearisability.operations import GENERATIONS, Kind, Operation, OperationHistory, Request

_POLLER, _OPERATOR, _FIRST_CLIENT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Mix:
    """What is drawn. Shares are of 1; a share of 0 leaves the thing out. tokens: most of one request."""

    requests: int = 10
    clients: int = 3
    slots: int = 4
    tokens: int = 12
    cancels: float = 0.3
    unknown: float = 0.1
    busy: float = 0.05
    story: float = 0.02


@dataclass(slots=True)
class _Client:
    process: int
    call: Operation | None = None
    published: bool = False


@dataclass
class _Ring:
    rng: random.Random
    mix: Mix
    now: int = 0
    requests: list[Request] = field(default_factory=list)
    done: list[Operation] = field(default_factory=list)
    sq: deque[tuple[Kind, int]] = field(default_factory=deque)
    cq: list[tuple[Kind, int, int, str]] = field(default_factory=list)
    active: dict[int, int] = field(default_factory=dict)  # request -> tokens made
    judged: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)  # slot -> newest generation handed out
    owed: dict[int, int] = field(default_factory=dict)  # request -> slot, until its end was polled
    cancelled: set[int] = field(default_factory=set)
    epoch: int = 0
    closing: Kind | None = None
    processes: int = _FIRST_CLIENT

    def tick(self) -> int:
        self.now += 1
        return self.now

    # ---- clients

    def client(self) -> _Client:
        self.processes += 1
        return _Client(self.processes - 1)

    def act(self, client: _Client) -> None:
        """One small step of a client: call, publish, return."""
        if client.call is None:
            client.call = self._next_call(client.process)
            client.published = False
        elif not client.published and self.rng.random() >= self.mix.unknown / 2:
            assert client.call.request is not None
            self.sq.append((client.call.kind, client.call.request))
            client.published = True
        elif self.rng.random() < self.mix.unknown or not client.published:
            self.done.append(client.call)  # nobody knows: the client is replaced by another
            client.process, client.call = self.client().process, None
        else:
            self.done.append(replace(client.call, returned=self.tick()))
            client.call = None

    def _next_call(self, process: int) -> Operation | None:
        rng = self.rng
        open_requests = [r for r in self.owed if r not in self.cancelled and self.requests[r].epoch == self.epoch]
        if open_requests and rng.random() < self.mix.cancels / 4:
            target = rng.choice(open_requests)
            if any(o.kind is Kind.SUBMIT and o.request == target for o in self.done):
                self.cancelled.add(target)
                return Operation(Kind.CANCEL, process, self.tick(), None, target)
        taken = set(self.owed.values())
        free = [slot for slot in range(self.mix.slots) if slot not in taken]
        if len(self.requests) >= self.mix.requests or not (free or rng.random() < self.mix.busy):
            return None
        slot = rng.choice(free) if free and rng.random() >= self.mix.busy else rng.randrange(self.mix.slots)
        self.given[slot] = generation = self.given.get(slot, 0) % (GENERATIONS - 1) + 1
        ends = frozenset(reason for reason in ("EOS", "DEADLINE", "BAD_TOKEN") if rng.random() < 0.2)
        self.requests.append(Request(slot, generation, rng.randint(1, self.mix.tokens), ends, self.epoch))
        number = len(self.requests) - 1
        self.owed[number] = slot
        return Operation(Kind.SUBMIT, process, self.tick(), None, number)

    # ---- engine

    def engine(self) -> None:
        if self.sq and self.rng.random() < 0.6:
            kind, number = self.sq.popleft()
            if kind is Kind.SUBMIT:
                self._take(number)
            elif number in self.active:
                self._end(number, Kind.FINISH, "CANCELLED")
        elif self.active:
            number = self.rng.choice(list(self.active))
            request = self.requests[number]
            made = self.active[number]
            if "DEADLINE" in request.may_end and self.rng.random() < 0.1:
                self._end(number, Kind.ERROR, "DEADLINE")
                return
            self.cq.append((Kind.TOKEN, number, made, ""))
            self.active[number] = made + 1
            if made + 1 == request.max_tokens:
                self._end(number, Kind.FINISH, "LENGTH")
            elif "EOS" in request.may_end and self.rng.random() < 0.2:
                self._end(number, Kind.FINISH, "EOS")

    def _take(self, number: int) -> None:
        request = self.requests[number]
        if self.judged.get(request.slot, 0) >= request.generation:
            self.cq.append((Kind.ERROR, number, 0, "BAD_GENERATION"))
            return
        self.judged[request.slot] = request.generation
        if any(self.requests[other].slot == request.slot for other in self.active):
            self.cq.append((Kind.ERROR, number, 0, "SLOT_BUSY"))
        elif self.closing is not None:
            self.cq.append((Kind.ERROR, number, 0, "DRAINING"))
        elif "BAD_TOKEN" in request.may_end and self.rng.random() < 0.5:
            self.cq.append((Kind.ERROR, number, 0, "BAD_TOKEN"))
        else:
            self.active[number] = 0

    def _end(self, number: int, kind: Kind, reason: str) -> None:
        self.cq.append((kind, number, self.active.pop(number), reason))

    # ---- poller and operator

    def deliver(self, invoked: int) -> None:
        count = self.rng.randint(0, len(self.cq))
        batch, self.cq = self.cq[:count], self.cq[count:]
        returned = self.tick()
        for kind, number, index, reason in batch:
            self.done.append(Operation(kind, _POLLER, invoked, returned, number, index, reason=reason))
            if kind is not Kind.TOKEN:
                self.owed.pop(number, None)

    def story(self, kind: Kind) -> Operation:
        """Something that concerns the whole ring; it begins now."""
        started = Operation(kind, _OPERATOR, self.tick(), None)
        if kind is Kind.LAPSE:
            for number in list(self.active):
                self._end(number, Kind.ERROR, "LEASE_LOST")
        elif kind is Kind.EPOCH:
            self.epoch += 1
            started = replace(started, index=self.epoch)
            for held in (self.sq, self.cq, self.active, self.judged, self.given, self.owed):
                held.clear()
        else:
            self.closing = kind
            if kind is Kind.STOP:
                for number in list(self.active):
                    self._end(number, Kind.ERROR, "DRAINING")
        return started


def draw(rng: random.Random, mix: Mix | None = None) -> OperationHistory:
    """One legal history, complete: it ends with QUIET."""
    mix = mix or Mix()
    ring = _Ring(rng, mix)
    clients = [ring.client() for _ in range(mix.clients)]
    polling: int | None = None
    telling: Operation | None = None
    idle = 0
    while idle < 20:  # a client that has nothing to do is asked a few times more, for cancels
        chosen = rng.randrange(mix.clients + 3)
        if chosen < mix.clients:
            ring.act(clients[chosen])
        elif chosen == mix.clients:
            ring.engine()
        elif chosen == mix.clients + 1:
            if polling is None:
                polling = ring.tick()
            else:
                ring.deliver(polling)
                polling = None
        elif telling is not None:
            ring.done.append(replace(telling, returned=ring.tick()))
            telling = None
        elif rng.random() < mix.story:
            kinds = [Kind.LAPSE, Kind.DRAIN, Kind.STOP]
            if polling is None and all(client.call is None for client in clients):
                kinds = [Kind.EPOCH] * 4 + kinds
            telling = ring.story(rng.choice(kinds))
            if telling.kind is Kind.EPOCH or rng.random() < 0.5:  # nobody else does anything meanwhile
                ring.done.append(replace(telling, returned=ring.tick()))
                telling = None
        quiet = not (ring.sq or ring.active or ring.cq) and all(client.call is None for client in clients)
        full = len(ring.requests) >= mix.requests or len(set(ring.owed.values())) == mix.slots
        idle = idle + 1 if quiet and full and polling is None and telling is None else 0
    ring.done.append(Operation(Kind.QUIET, _POLLER, ring.tick(), ring.tick()))
    # In the order of a log: as they were invoked, events of one poll as they came.
    return OperationHistory(tuple(ring.requests), tuple(sorted(ring.done, key=lambda o: o.invoked)))
