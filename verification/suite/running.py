"""Running a program and enforcing what every property presupposes: it was served, whole and for the right reasons."""

from __future__ import annotations

from collections.abc import Callable

from verification.fixtures import Judge, Subject
from verification.history import History
from verification.program import Program
from verification.properties import queue_ordering


def serve(
    subject: Subject,
    program: Program,
    judge: Judge,
    *,
    every: int = 0,
    observe: Callable[[], None] = lambda: None,
    together: bool = False,
    deadline_s: float | None = None,
) -> History:
    """Runs a program and enforces delivery and terminal events, by the oracle's ids and the rig's options.

    together, deadline_s: as `Subject.run` says.
    """
    judge.case(program)
    history = subject.run(program, every=every, observe=observe, together=together, deadline_s=deadline_s)
    eos_ids = subject.eos_ids
    judge(queue_ordering.check_history(history, eos_ids=eos_ids, max_len=subject.max_len), history)
    judge(queue_ordering.check_limits(subject.rig.descriptor.config, eos_ids, subject.max_len))
    return history
