"""Checker: the scheduler in its own thread, with a model that stalls, a hold, and a stop that finds a step running.

What must happen is waited for until `PATIENCE_S`, far beyond what it takes; what must not happen is judged only where
this process itself was not kept waiting.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason, StepStatus
from verification.mutants.checkers.base import Finding, Product, found
from verification.scheduler.front_end import Submission
from verification.scheduler.harness import Harness, small_config

PATIENCE_S = 4.0
LEASE_S = 0.8
HELD_S = 1.0
GRACE_MS = 40
_TRIES = 4


class _Model(threading.Thread):
    """Takes every step at once, or holds on to it with its results written while `stall` is set."""

    def __init__(self, h: Harness, token: int) -> None:
        super().__init__(daemon=True)
        self.h, self.token = h, token
        self.stall, self.stalled = threading.Event(), threading.Event()
        self.go = threading.Event()

    def run(self) -> None:
        while (word := self.h.scheduler.wait_plan(50)) >= 0:
            if word == 0:
                continue
            rows = self.h.plan["rows"]
            for i in range(int(self.h.plan["header"]["n_rows"][0])):
                if rows[i]["sample"]:
                    self.h.plan["results"][i] = (self.token, -0.5, StepStatus.OK, 0)
            if self.stall.is_set():
                self.stalled.set()
                self.go.wait()
                self.go.clear()
                self.stalled.clear()
            self.h.scheduler.complete(int(StepStatus.OK))

    def resume(self) -> None:
        self.stall.clear()
        self.go.set()


class _Objection(Exception):
    def __init__(self, clause: str, words: str) -> None:
        super().__init__(words)
        self.clause = clause


class Live:
    """The loop's own duties: heartbeat, rings and deadlines while a step runs; holds; a stop that is in time."""

    name = "live-thread"
    where = frozenset({"native"})
    clauses: Mapping[str, frozenset[str]] = {
        "serves": frozenset("X"),
        "heartbeat in a step": frozenset("X"),
        "rings read in a step": frozenset("X"),
        "deadline in a step": frozenset("X"),
        "hold is acknowledged": frozenset("X"),
        "heartbeat while held": frozenset("X"),
        "leases over a hold": frozenset("X"),
        "stop in time": frozenset("X"),
        "overdue step has no results": frozenset("X"),
    }
    functions = frozenset({"verification.mutants.checkers.live.Live.judge"})
    seconds = 60.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """One life of a scheduler thread; sizes, lengths and pauses are drawn."""
        rng = random.Random(f"live/{seed}")
        config = small_config(
            slots=8, max_rows=rng.choice((3, 4, 5)), lease_us=int(LEASE_S * 1e6), max_len=rng.choice((24, 32, 40)),
            page_size=rng.choice((2, 4, 8)), pages=2 + 60, masks=0, cq_entries=64, visibility_us=10_000,
        )  # fmt: skip
        h = Harness(config, native=product.native, checks=())
        model = _Model(h, rng.randrange(1, config.vocab))
        h.scheduler.start(GRACE_MS)
        model.start()
        try:
            self.judge(h, model, rng)
        except _Objection as objection:
            return found(self, objection.clause, str(objection))
        finally:
            h.control["control"]["stop_request"] = 1
            model.resume()
        h.scheduler.join()
        return None

    def judge(self, h: Harness, model: _Model, rng: random.Random) -> None:
        """Raises _Objection."""
        front = h.fronts[0]
        heard: list[tuple[int, int, int, int]] = []  # slot, generation, kind, reason
        front.attach()
        self._await(lambda: front.acknowledged, "serves", "no epoch was acknowledged")

        def listen() -> None:
            front.renew()
            tail, at = int(front.views["gpu"]["cq_tail"][0]), front.cq_head
            for event in (front.views["cq"][i % h.config.cq_entries] for i in range(at, tail)):
                heard.append(tuple(int(event[name]) for name in ("slot", "generation", "kind", "reason")))  # type: ignore[arg-type]
            front.consume(until=tail)

        def ask(length: int, most: int, **fields: Any) -> Submission:
            made = front.submit([rng.randrange(h.config.vocab) for _ in range(length)], most, flags=1, **fields)
            if made is None:
                raise _Objection("serves", "the ring gives no credit back")
            return made

        def ended(x: Submission) -> tuple[int, int] | None:
            ends = [e[2:] for e in heard if e[:2] == (x.slot, x.generation) and e[2] >= EventKind.FINISH]
            return ends[0] if ends else None

        def over(x: Submission) -> Callable[[], bool]:
            def look() -> bool:
                listen()
                return ended(x) is not None

            return look

        plain = ask(rng.randrange(1, 9), rng.randrange(2, 8))
        self._await(over(plain), "serves", "a plain request has no end")
        if ended(plain) != (EventKind.FINISH, FinishReason.LENGTH):
            raise _Objection("serves", f"a plain request ended with {ended(plain)}")

        model.stall.set()
        long = ask(3, h.config.max_len - 4)
        self._await(model.stalled.is_set, "serves", "no step was launched", listen)
        self._beats(h, "heartbeat in a step", listen)
        other = ask(2, 4)
        front.cancel(other)
        self._await(over(other), "rings read in a step", "a cancel in a step that runs on has no answer")
        due = ask(2, 4, deadline_us=rng.randrange(1000, 20_000))
        self._await(over(due), "deadline in a step", "a deadline passes in a step that runs on")
        if ended(due) != (EventKind.ERROR, ErrorReason.DEADLINE):
            raise _Objection("deadline in a step", f"it ended with {ended(due)}")
        self._hold(h, model, listen, lambda: ended(long))

        heard.clear()
        h.control["control"]["stop_request"] = 1
        stopped = lambda: int(h.control["status"]["state"][0]) == EngineState.STOPPED  # noqa: E731
        self._await(stopped, "stop in time", f"a stop with {GRACE_MS} ms of grace is not over", listen)
        self._await(over(long), "stop in time", "a request that the stop found has no end")
        if any(kind == EventKind.TOKEN for _, _, kind, _ in heard):
            raise _Objection("overdue step has no results", "a token came out of the step that the stop gave up")

    def _hold(
        self, h: Harness, model: _Model, listen: Callable[[], None], ended: Callable[[], tuple[int, int] | None]
    ) -> None:
        """Holds between two steps for longer than the lease, from just after one renewal to the next."""
        control, status = h.control["control"], h.control["status"]
        for ticket in range(1, _TRIES + 1):
            if not model.stalled.is_set():
                model.stall.set()
                self._await(model.stalled.is_set, "serves", "no step was launched", listen)
            control["pause_request"] = ticket
            listen()
            self._beats(h, "heartbeat in a step")  # the renewal has been read
            renewed = time.monotonic()
            model.go.set()
            acknowledged = lambda t=ticket: int(status["pause_ack"][0]) >= t  # noqa: E731
            self._await(acknowledged, "hold is acknowledged", "nothing is held between two steps")
            before = time.monotonic() - renewed
            self._beats(h, "heartbeat while held")
            time.sleep(max(0.0, HELD_S - (time.monotonic() - renewed)))
            released = time.monotonic()
            control["pause_release"] = ticket
            self._beats(h, "heartbeat in a step")  # a renewal before the first poll would hide what is held against us
            listen()
            kept_waiting = before + time.monotonic() - released
            self._await(model.stalled.is_set, "leases over a hold", "the request that was held has gone", listen)
            if ended() is None:
                return
            if kept_waiting < 0.8 * LEASE_S:
                raise _Objection("leases over a hold", f"it ended with {ended()}, {kept_waiting:.3f} s of silence")
            return  # this process itself was too slow to say

    def _beats(self, h: Harness, clause: str, also: Callable[[], None] = lambda: None) -> None:
        first = int(h.control["status"]["heartbeat"][0])
        self._await(
            lambda: int(h.control["status"]["heartbeat"][0]) > first + 2, clause, f"it stands still at {first}", also
        )

    def _await(
        self, done: Callable[[], bool], clause: str, words: str, also: Callable[[], None] = lambda: None
    ) -> None:
        until = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > until:
                raise _Objection(clause, f"{words} after {PATIENCE_S:g} s")
            also()
            time.sleep(0.001)


CHECKERS = (Live(),)
