"""Checker: what the clients of drawn programs saw has a legal order of operations (`verification.linearisability`).

Clients hand in, cancel, poll and attach on the scheduler stepped by hand; only what they called and heard is judged.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from blink_core.abi.definition import SEQ_BITS
from blink_core.abi.enums import Op
from verification.linearisability.check import check
from verification.linearisability.operations import Kind, Operation, OperationHistory, Request
from verification.linearisability.recorded import named
from verification.mutants.checkers.base import Finding, Product, found, left
from verification.result import Verdict
from verification.scheduler.front_end import FrontEnd, entry
from verification.scheduler.harness import Harness, small_config

PROGRAMS, TICKS = 60, 40  # of one seed
SETTLED_WITHIN = 300  # steps until the clients say that they have waited
# What each law of verification/linearisability/specification.py speaks of.
LAWS: dict[str, str] = {
    "V1": "DRV", "V2": "RS", "V3": "RS", "V4": "RS", "V5": "BRS", "V6": "RS", "V7": "RS", "V8": "DSV", "V9": "RS",
    "V10": "BDRSX", "V11": "D", "V12": "DQRSV",
}  # fmt: skip
_LATEST = (1 << SEQ_BITS) - 4  # a few entries later sequence numbers begin anew
_FARTHEST = (1 << 23) - 4  # generations: the next jump wraps
_VOCAB_BEGIN = 2


class _Client:
    """One ring's operations. Calls and polls stand one behind the other on one clock."""

    def __init__(self, front: FrontEnd, rng: random.Random) -> None:
        self.front, self.rng = front, rng
        self.requests: list[Request] = []
        self.operations: list[Operation] = []
        self.by_key: dict[tuple[int, int, int], int] = {}
        self.now = 0
        self.first_epoch = front.epoch
        self._shift()

    @property
    def epoch(self) -> int:
        return self.front.epoch - self.first_epoch

    def add(self, kind: Kind, request: int | None = None, **fields: int | str) -> None:
        self.operations.append(Operation(kind, 0, self.now, self.now + 1, request, **fields))  # type: ignore[arg-type]
        self.now += 2

    def _shift(self) -> None:
        """Generations that begin anywhere, so that some wrap."""
        count = self.front.config.slots
        self.front.generation = [self.rng.choice((0, 5, _FARTHEST)) for _ in range(count)]
        self.jumped = [value != _FARTHEST for value in self.front.generation]

    def _request(self, slot: int, generation: int, most: int | None, ends: frozenset[str]) -> int:
        key = self.epoch, slot, generation
        number = self.by_key.setdefault(key, len(self.requests))
        if number == len(self.requests):
            self.requests.append(Request(slot, generation, most, ends, self.epoch))
        return number

    def submit(self) -> None:
        front, rng, c = self.front, self.rng, self.front.config
        if not (front.acknowledged and front.free):
            return
        slot = front.free[0]
        before, jumps = front.generation[slot], front.generation[slot] > _FARTHEST and not self.jumped[slot]
        if jumps:
            front.generation[slot] += (1 << 23) - 2
        length = rng.choice((1, 2, c.page_size, c.max_len // 2, c.max_len - 2))
        most = rng.choice((0, 1, 2, 3, 5, c.max_len // 2, c.max_len))
        flags = rng.choice((0, 1, 1, 3))
        prompt = [_VOCAB_BEGIN + (i + rng.randrange(2)) % 5 for i in range(length)]
        made = front.submit(prompt, most, flags=flags, priority=rng.choice((0, 0, 0, 1)))
        if made is None:
            front.generation[slot] = before  # else an older one than that, which was never used, would be a newer one
        else:
            self.jumped[slot] |= jumps
            ends = {"CONTEXT", "NEVER_FITS"} | ({"BAD_LENGTH"} if most == 0 else set())
            ends |= set() if flags & 1 else {"EOS"}
            self.add(Kind.SUBMIT, self._request(made.slot, made.generation, most, frozenset(ends)))

    def submit_old(self) -> None:
        """A generation a little older than the newest of its slot, which is judged before."""
        front = self.front
        used = sorted({slot for epoch, slot, _ in self.by_key if epoch == self.epoch})
        if not used or not front.acknowledged or front.sq_space() <= len(front.live) + 1:
            return
        slot = self.rng.choice(used)
        generation = front.generation[slot] - self.rng.choice((3, 4))
        if generation > 0 and (self.epoch, slot, generation) not in self.by_key:
            front.publish(entry(front.sq_tail, Op.SUBMIT, slot, generation))
            self.add(Kind.SUBMIT, self._request(slot, generation, None, frozenset()))

    def cancel(self) -> None:
        """Mostly of one that may still live."""
        front, rng = self.front, self.rng
        ours = [x for x in front.history if x.ring == front.index and x.epoch == front.epoch]
        if ours and front.acknowledged and front.sq_space() > 0:
            chosen = rng.choice(list(front.live.values()) if front.live and rng.random() < 0.6 else ours[-4:])
            front.cancel(chosen)
            self.add(Kind.CANCEL, self.by_key[self.epoch, chosen.slot, chosen.generation])

    def attach(self) -> None:
        self.front.attach()
        self._shift()
        self.add(Kind.EPOCH, index=self.epoch)

    def poll(self) -> None:
        front = self.front
        if not front.acknowledged:
            return
        tail = int(front.views["gpu"]["cq_tail"][0])
        for at in range(front.cq_head, tail):
            event = front.views["cq"][at % front.config.cq_entries]
            number = self._request(int(event["slot"]), int(event["generation"]), None, frozenset())
            kind, reason = named(int(event["kind"]), int(event["reason"]))
            self.operations.append(
                Operation(kind, 0, self.now, self.now + 1, number, int(event["index"]), reason=reason)
            )
        self.now += 2
        front.consume(until=tail)


def _run(product: Product, rng: random.Random) -> list[OperationHistory]:
    """One drawn program; the history of each ring, until its clients have waited for all ends."""
    page_size, slots, rows = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    max_len = rng.choice((8, 12, 16))
    longest = -(-max_len // page_size)
    config = small_config(
        rings=rng.choice((1, 1, 2)), slots=slots, max_rows=rows, max_len=max_len, page_size=page_size,
        pages=2 + longest + rng.randrange(4), token_budget=rows + rng.randrange(6), prefix_cache=rng.randrange(2),
        reservation_steps=rng.choice((1, 2, 4)), masks=0, max_logprobs=0, visibility_us=1,
        cq_entries=rng.choice((1, 2, 4)) << (slots + rows - 1).bit_length(),
        sq_entries=1 << (2 * slots + 1).bit_length(),
    )  # fmt: skip
    h = Harness(config, native=product.native, checks=())
    h.attach()
    first = rng.choice((0, 0, 0, _LATEST))
    for front, views in zip(h.fronts, h.rings, strict=True):
        h.state["rings"]["sq_next"][front.index] = views["gpu"]["sq_head"] = front.sq_tail = first
    clients = [_Client(front, rng) for front in h.fronts]
    drained = rng.random() < 0.2
    for tick in range(TICKS):
        for client in clients:
            _act(client, rng)
        if drained and tick == TICKS - 5:
            h.control["control"]["drain_request"] = 1
            for client in clients:
                client.add(Kind.DRAIN)
        launched = h.boundary()
        for client in clients:
            _act(client, rng)
        for _ in range(rng.randrange(3)):
            h.poll()
            for client in clients:
                if rng.random() < 0.7:
                    client.poll()
                    _act(client, rng)
        if launched:
            h.run_model()
    for _ in range(SETTLED_WITHIN):
        if h.boundary():
            h.run_model()
        h.poll()
        for client in clients:
            client.poll()
        if not any(front.live for front in h.fronts):
            break
    for client in clients:
        client.add(Kind.QUIET)
    return [OperationHistory(tuple(client.requests), tuple(client.operations)) for client in clients]


def _act(client: _Client, rng: random.Random) -> None:
    drawn = rng.random()
    if drawn < 0.4:
        client.submit()
    elif drawn < 0.6:
        client.cancel()
    elif drawn < 0.63:
        client.submit_old()
    elif drawn < 0.64:
        client.attach()


class Linearisable:
    """Histories of drawn programs until one has no legal order."""

    name = "linearisability"
    where = frozenset({"native"})
    clauses: Mapping[str, frozenset[str]] = {law: frozenset(classes) for law, classes in LAWS.items()}
    functions = frozenset(
        {
            "verification.linearisability.specification.step",
            "verification.linearisability.search.linearise",
            "verification.linearisability.partition.broken_fence",
        }
    )
    seconds = 30.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """Raises RuntimeError for a history that the search cannot decide."""
        for number in range(PROGRAMS):
            if left(deadline) == 0:
                raise TimeoutError(f"{number} of {PROGRAMS} programs were run")
            for ring, history in enumerate(_run(product, random.Random(f"linearisability/{seed}/{number}"))):
                if all(o.kind is Kind.QUIET for o in history.operations):
                    continue
                decision = check(history)
                if decision.verdict is Verdict.INVALID:
                    return found(self, decision.law, f"program {number}, ring {ring}: {decision.message}")
                if decision.verdict is Verdict.UNKNOWN:
                    raise RuntimeError(f"program {number}, ring {ring}: {decision.message}")
        return None


CHECKERS = (Linearisable(),)
