"""The `history` fixture: runs programs for one test and remembers what came of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from blink_core.abi.enums import ErrorReason
from verification.history import History
from verification.judge import Judge
from verification.program import Program, RequestSpec, draw_program
from verification.properties import queue_ordering
from verification.result import CheckResult
from verification.subject import Subject


class HistoryRunner:
    """Runs programs on an engine; `ran` holds the histories of the test, oldest first."""

    def __init__(self, subject: Subject, judge: Judge, seed: int) -> None:
        self.ran: list[History] = []
        self._subject, self._judge, self._seed = subject, judge, seed

    def draw(self, count: int = 1, *, on: Subject | None = None, seed: int | None = None) -> list[Program]:
        """`count` programs for an engine (by default the one under test), by the test's own seed or by `seed`."""
        rng = random.Random(self._seed if seed is None else seed)
        return [draw_program(rng, (on or self._subject).shape) for _ in range(count)]

    def __call__(
        self,
        program: Program | RequestSpec,
        *,
        on: Subject | None = None,
        every: int = 0,
        observe: Callable[[], None] = lambda: None,
        deadline_s: float | None = None,
    ) -> History:
        """Runs a program, or one request, to its end or to the deadline, by default that of `drivers.ring.deadline_of`.

        on: the engine, by default the one under test. every, observe: call `observe` after each `every` events.
        """
        subject = on or self._subject
        whole = program if isinstance(program, Program) else Program((program,))
        self._judge.case(whole)
        history = subject.run(whole, every=every, observe=observe, deadline_s=deadline_s)
        self.ran.append(history)
        return history

    def check(
        self, history: History, *, on: Subject | None = None, explained: Collection[ErrorReason] = ()
    ) -> CheckResult:
        """Judges delivery, terminal events and goodput of a history; raises PropertyViolation or PropertyUnknown.

        explained: errors that the test itself brings about, e.g. LEASE_LOST where it does not poll for a while.
        End-of-sequence ids are those that the engine states; the suite compares them with HuggingFace's.
        """
        subject = on or self._subject
        result = queue_ordering.check_history(
            history,
            eos_ids=subject.rig.descriptor.config.eos_ids,
            max_len=subject.rig.descriptor.config.max_len,
            explained=explained,
        )
        return self._judge(result, history)
