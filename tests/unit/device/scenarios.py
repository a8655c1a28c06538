"""Short cuts of the named scenarios: an attached harness, a valid request, a request's record."""

from __future__ import annotations

from blink_core.abi.enums import EventKind
from verification.scheduler import invariants
from verification.scheduler.front_end import FrontEnd, Submission
from verification.scheduler.harness import VOCAB, Harness, small_config

FINISH, ERROR = int(EventKind.FINISH), int(EventKind.ERROR)


def submit(front: FrontEnd, length: int, max_tokens: int, *, eos: bool = False, first: int = 1) -> Submission:
    """A valid request that must find room; it stops early only if `eos`."""
    prompt = [(first + 3 * i) % VOCAB for i in range(length)]
    made = front.submit(prompt, max_tokens, flags=0 if eos else 1)
    assert made is not None
    return made


def started(**fields: object) -> tuple[Harness, FrontEnd]:
    h = Harness(small_config(**fields))
    h.attach()
    return h, h.fronts[0]


def request(h: Harness, x: Submission) -> invariants.Row:
    return h.snapshot().requests[x.ring * h.config.slots + x.slot]
