"""Every field of a slot overwritten in shared memory, and drawn entries (design section 3: the GPU trusts nothing)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core.abi.definition import SLOT as SLOT_STRUCT
from blink_core.abi.dtypes import SLOT
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, Op
from verification.scheduler.expectations import deserved
from verification.scheduler.front_end import FrontEnd, entry, record_of, seal
from verification.scheduler.harness import VOCAB, Harness, small_config

FIELDS = [f.name for f in SLOT_STRUCT.fields]
INTEGERS = (0, 1, 2, 7, 8, 9, 23, 24, 25, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
FLOATS = (0.0, -0.0, -1.0, 1.0, 1.0000001, 1e-40, 3.4e38, float("nan"), float("inf"), float("-inf"))


def values(name: str, rng: np.random.Generator) -> list[Any]:
    """Values for one field: every limit's neighbourhood, and drawn bits."""
    kind, width = SLOT[name].base.kind, SLOT[name].base.itemsize
    if kind == "f":
        drawn = rng.integers(0, 2**32, 6, dtype=np.uint32).view(np.float32).tolist()
        return [*FLOATS, *drawn]
    top: int = 2 ** (8 * width)
    whole: list[Any] = [v % top for v in (*INTEGERS, top - 1)]
    whole += rng.integers(0, top - 1, 6, dtype=np.uint64).tolist()
    if SLOT[name].shape:
        signed = [int(np.uint32(v).astype(np.int32)) for v in whole]
        return [[v] * 8 for v in signed] + [[1] * 7 + [v] for v in signed]
    return whole


def bystanders(h: Harness) -> list[Any]:
    made = [f.submit([1 + f.index, 2, 3], 4, flags=1) for f in h.fronts]
    assert None not in made
    return made


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "torn"])
@pytest.mark.parametrize("field", FIELDS)
def test_fuzzed_field(field: str, sealed: bool) -> None:
    """Catches: a descriptor value that hangs, crashes, reads out of bounds, hits another request, or gets no reason."""
    h = Harness(small_config(rings=2, page_size=4, pages=2 + 4, visibility_us=3))
    h.attach()
    front, rng = h.fronts[0], np.random.default_rng(len(field) * 2 + sealed)
    refused = 0
    for value in values(field, rng):
        others = bystanders(h)
        base: dict[str, Any] = {"flags": 1, "stop_ids": (5,), "seed": 3, "tag": 9}
        x = front.submit([1, 2, 3, 4], 6, corrupt={field: value}, sealed=sealed, **base)
        assert x is not None
        x.refusal = deserved(h.config, x.descriptor, x.generation, front.views["arena"])
        refused += x.refusal is not None
        for _ in range(h.config.visibility_us + 1):
            h.poll()
        if x.refusal is not None:
            assert x.terminal == (EventKind.ERROR, x.refusal, 0), f"{field} = {value}"
        h.settle()
        assert all(o.terminal == (EventKind.FINISH, FinishReason.LENGTH, 4) for o in others), f"{field} = {value}"
    if not sealed or field not in ("seed", "choice", "tag", "deadline_us", "top_k"):
        assert refused > 0, "no drawn value was refused: this fuzzes nothing"


def test_reserved_bytes_are_covered_by_the_checksum() -> None:
    """Catches: a descriptor whose unused bytes are stale, taken as valid."""
    h = Harness(small_config())
    h.attach()
    front = h.fronts[0]
    x = front.submit([1, 2], 2, flags=1, refusal=ErrorReason.CHECKSUM)
    assert x is not None
    front.views["slots"].view(np.uint8)[x.slot * SLOT.itemsize + 250] ^= 1
    h.settle()
    assert x.terminal == (EventKind.ERROR, ErrorReason.CHECKSUM, 0)


def test_descriptor_that_becomes_visible_late() -> None:
    """Catches: a torn descriptor or prompt refused at once, or taken as it is, instead of being read again."""
    h = Harness(small_config(visibility_us=5))
    h.attach()
    front = h.fronts[0]
    for part in ("slots", "arena"):
        x = front.submit([1, 2, 3], 2, flags=1)
        assert x is not None
        section = front.views[part]
        whole = section.copy()
        if part == "slots":
            section["prompt_len"][x.slot] = 2
        else:
            section[int(x.descriptor["prompt_offset"]) + 1] = 7
        for _ in range(4):
            assert h.poll() == 0
        section[:] = whole
        assert h.poll() == 1
        h.settle()
        assert x.terminal == (EventKind.FINISH, FinishReason.LENGTH, 2)
    assert int(h.state["rings"]["torn"][0]) == 2


def test_prompt_of_foreign_tokens() -> None:
    """Catches: a token id outside the vocabulary, at any place of the prompt, that reaches the model's embedding."""
    h = Harness(small_config())
    h.attach()
    front = h.fronts[0]
    for place in range(4):
        for bad in (VOCAB, -1, 2**31 - 1, -(2**31)):
            prompt = [1, 2, 3, 4]
            prompt[place] = bad
            x = front.submit(prompt, 2, flags=1, refusal=ErrorReason.BAD_TOKEN)
            h.settle()
            assert x is not None
            assert x.terminal == (EventKind.ERROR, ErrorReason.BAD_TOKEN, 0)


def test_bias_of_foreign_tokens_and_values() -> None:
    """Catches: a logit bias at an id outside the vocabulary, or of no number, that reaches the sampler."""
    h = Harness(small_config())
    h.attach()
    front = h.fronts[0]
    bad = [(VOCAB, 1.0), (-1, 1.0), (2**31 - 1, 1.0), (1, float("nan")), (1, float("inf")), (1, float("-inf"))]
    for place in range(3):
        for pair in bad:
            bias: list[tuple[int, float]] = [(4, 1.0), (5, -1.0), (6, 2.0)]
            bias[place] = pair
            reason = ErrorReason.BAD_TOKEN if pair[1] == 1.0 else ErrorReason.BAD_PARAM
            x = front.submit([1, 2, 3], 2, flags=1, bias=bias, refusal=reason)
            h.settle()
            assert x is not None
            assert x.terminal == (EventKind.ERROR, reason, 0)
    one_more = front.submit([1, 2, 3], 2, bias=[(i, 1.0) for i in range(4)], refusal=ErrorReason.BAD_PARAM)
    h.settle()
    assert one_more is not None
    assert one_more.terminal == (EventKind.ERROR, ErrorReason.BAD_PARAM, 0)


def test_extent_at_the_end_of_the_arena() -> None:
    """Catches: a prompt read beyond the arena, into the completion queue, or an off-by-one refusal at its end."""
    h = Harness(small_config())
    h.attach()
    front, size = h.fronts[0], h.config.arena_tokens
    for offset, length, pairs in (
        *((size - 3, 3, 0), (size - 2, 3, 0), (size, 1, 0), (size - 23, 23, 0)),
        *((size - 7, 3, 2), (size - 6, 3, 2), (size - 3, 3, 1), (size - 4, 3, 1)),
    ):
        prompt, bias = [1 + i % 5 for i in range(length)], [(i, 0.5) for i in range(pairs)]
        x = front.submit(prompt, 1, flags=1, bias=bias, corrupt={"prompt_offset": offset})
        assert x is not None
        start = x.slot * front.extent
        payload = front.views["arena"][start : start + length + 2 * pairs].copy()
        kept = payload[: max(0, size - offset)]
        front.views["arena"][offset : offset + len(kept)] = kept
        x.refusal = None if offset + length + 2 * pairs <= size else ErrorReason.BAD_EXTENT
        h.settle()
        assert x.terminal is not None
        assert x.terminal[0] == (EventKind.ERROR if x.refusal else EventKind.FINISH)


def test_random_bytes_in_slots_and_queue() -> None:
    """Catches: bytes under a well-formed entry that crash the engine, or get a second terminal event or none."""
    h = Harness(small_config(rings=2, slots=4, sq_entries=16, visibility_us=1))
    h.attach()
    front, rng = h.fronts[0], np.random.default_rng(11)
    for _ in range(120):
        others = [h.fronts[1].submit([1, 2, 3], 2, flags=1)]
        assert others != [None]
        x = front.submit([1, 2, 3, 4], 3, flags=1)
        assert x is not None
        raw = np.frombuffer(rng.bytes(SLOT.itemsize), SLOT).copy()
        chosen = rng.random(len(FIELDS)) < 0.3
        slot = record_of(x.descriptor)
        for name, taken in zip(FIELDS, chosen.tolist(), strict=True):
            if taken:
                slot[name] = raw[name]
        if rng.random() < 0.8:
            seal(slot)
        front.views["slots"][x.slot] = slot[0]
        x.descriptor = slot[0].copy()
        x.refusal = deserved(h.config, slot[0], x.generation, front.views["arena"])
        h.settle()
        assert x.terminal is not None
        assert others[0] is not None
        assert others[0].terminal == (EventKind.FINISH, FinishReason.LENGTH, 2)


def test_random_entries() -> None:
    """Catches: an entry with the right sequence number and drawn other bits that hits a request of another ring."""
    h = Harness(small_config(rings=2, slots=4, sq_entries=16, visibility_us=1))
    h.attach()
    front, rng = h.fronts[0], np.random.default_rng(13)
    other = h.fronts[1]
    for _ in range(150):
        op, slot, generation = int(rng.integers(3, 16)), int(rng.integers(0, 4096)), int(rng.integers(0, 2**24))
        if rng.random() < 0.3:
            op = Op.CANCEL
        if rng.random() < 0.3:
            op, slot = Op.SUBMIT, int(rng.integers(h.config.slots, 4096))
        h.strays.add((0, slot, generation))
        before = len(h.history)
        made = other.submit([1, 2, 3], 2, flags=1)
        assert made is not None
        publish(front, op, slot, generation)
        h.settle()
        assert made.terminal == (EventKind.FINISH, FinishReason.LENGTH, 2)
        assert len(h.history) == before + 1


def publish(front: FrontEnd, op: int, slot: int, generation: int) -> None:
    front.publish(entry(front.sq_tail, op, slot, generation))
