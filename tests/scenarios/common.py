"""What the scheduler scenarios share: requests by length, what a request gives alone, and the event log by step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from blink_core.abi.enums import EventKind, LogKind, SlotFlag
from verification.scheduler import invariants
from verification.scheduler.front_end import FrontEnd, Submission
from verification.scheduler.harness import VOCAB, Harness, next_token, small_config

FINISH, ERROR = int(EventKind.FINISH), int(EventKind.ERROR)


def started(**fields: Any) -> tuple[Harness, FrontEnd]:
    """A scheduler with one attached front end; `fields` of `small_config`."""
    h = Harness(small_config(**fields))
    h.attach()
    return h, h.fronts[0]


def request(h: Harness, x: Submission) -> invariants.Row:
    """The request's record as it lies in memory."""
    return h.snapshot().requests[x.ring * h.config.slots + x.slot]


def submit(front: FrontEnd, length: int, max_tokens: int, *, eos: bool = False, **fields: Any) -> Submission:
    """A valid request that must find a slot; its prompt shares no page with another one of the test."""
    n = len(front.history) + 1
    return submit_tokens(front, [(n + 5 * i * n) % VOCAB for i in range(length)], max_tokens, eos=eos, **fields)


def submit_tokens(
    front: FrontEnd, prompt: list[int], max_tokens: int, *, eos: bool = False, **fields: Any
) -> Submission:
    """A valid request of these tokens that must find a slot; it ends early only if `eos`."""
    fields.setdefault("flags", 0 if eos else SlotFlag.IGNORE_EOS)
    made = front.submit(prompt, max_tokens, **fields)
    assert made is not None, "the ring has no slot or entry left"
    return made


def text(length: int, seed: int = 1) -> list[int]:
    """A prompt; those of two seeds differ from their first token on."""
    return [(seed + 3 * i * seed) % VOCAB for i in range(length)]


def alone(prompt: list[int], count: int) -> list[int]:
    """Output of a request that runs by itself."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(prompt + tokens))
    return tokens


def of(x: Submission, entries: list[Any]) -> list[Any]:
    """The entries that are about this request."""
    key = (x.ring, x.slot, x.generation)
    return [e for e in entries if (int(e["ring"]), int(e["slot"]), int(e["generation"])) == key]


def plans(h: Harness) -> dict[int, dict[tuple[int, int, int], Any]]:
    """PLAN_ROW entries by step and (ring, slot, generation)."""
    found: dict[int, dict[tuple[int, int, int], Any]] = defaultdict(dict)
    for e in h.entries(LogKind.PLAN_ROW):
        found[int(e["step"])][int(e["ring"]), int(e["slot"]), int(e["generation"])] = e
    return found


def free_pages(h: Harness) -> int:
    """Pages that a request could have: free ones and idle cached ones."""
    header = h.state["header"][0]
    return int(header["free_pages"]) + int(header["idle_cached"])


def preemptions(h: Harness) -> int:
    return int(h.state["header"]["preemptions"][0])
