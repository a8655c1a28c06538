"""Submissions that break one rule each (R3, R6 to R8), and ones that are torn at first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blink_core.abi.enums import Op
from verification.spec.state import Descriptor

if TYPE_CHECKING:
    from verification.lockstep.programs import Runner

NAN, INF = float("nan"), float("inf")

# What is wrong with the descriptor, in the order of R7 as a rule; each function gets the configuration and the good
# descriptor.
FIELDS: tuple[Callable[[Any, Descriptor], dict[str, Any]], ...] = (
    lambda c, d: {"prompt_len": 0, "signed": ()},
    lambda c, d: {"prompt_len": c.max_len},
    lambda c, d: {"max_tokens": 0},
    lambda c, d: {"max_tokens": c.max_len + 1},
    lambda c, d: {"prompt_offset": c.arena_tokens - d.prompt_len + 1},
    lambda c, d: {"prompt_offset": (1 << 32) - 1},
    lambda c, d: {"n_bias": c.max_bias + 1},
    lambda c, d: {"prompt_offset": c.arena_tokens - d.prompt_len, "n_bias": c.max_bias},
    lambda c, d: {"temperature": NAN},
    lambda c, d: {"temperature": INF},
    lambda c, d: {"temperature": -0.5},
    lambda c, d: {"top_p": 0.0},
    lambda c, d: {"top_p": 1.5},
    lambda c, d: {"top_p": NAN},
    lambda c, d: {"min_p": -0.5},
    lambda c, d: {"min_p": 1.5},
    lambda c, d: {"min_p": NAN},
    lambda c, d: {"repetition_penalty": 0.0},
    lambda c, d: {"repetition_penalty": INF},
    lambda c, d: {"presence_penalty": NAN},
    lambda c, d: {"presence_penalty": -INF},
    lambda c, d: {"frequency_penalty": INF},
    lambda c, d: {"min_tokens": d.max_tokens + 1},
    lambda c, d: {"priority": 4},
    lambda c, d: {"logprobs": c.max_logprobs + 1},
    lambda c, d: {"flags": d.flags | 8},
    lambda c, d: {"flags": d.flags | 4, "mask_box": c.masks},
    lambda c, d: {"flags": d.flags & 3, "mask_box": 1},
    lambda c, d: {"n_stop": 9},
    lambda c, d: {"n_stop": 1, "stop_ids": (c.vocab, *d.stop_ids[1:])},
    lambda c, d: {"n_stop": 2, "stop_ids": (0, -1, *d.stop_ids[2:])},
    lambda c, d: {"signed": (c.vocab, *d.signed[1:])},
    lambda c, d: {"signed": (-1, *d.signed[1:])},
    lambda c, d: {"max_tokens": c.max_len, "min_tokens": 0},  # NEVER_FITS in the smallest pools
    lambda c, d: {"signed": (*d.signed[:-1], 0x7F800000)} if d.n_bias else {"top_p": -1.0},
    lambda c, d: (
        {"signed": (*d.signed[: d.prompt_len], c.vocab, *d.signed[d.prompt_len + 1 :])}
        if d.n_bias
        else {"priority": 255}
    ),
    lambda c, d: {"deadline_us": (1 << 64) - 1},
)


def submit(run: Runner, x: bytes) -> None:
    """x[7] chooses what is wrong, sometimes two things at once; x[2] to x[6] the rest of the request."""
    c, d = run.config, run.d
    ring = x[1] % c.rings
    slot = run.free_slot(ring, x[1] // 4)
    kind = x[7] % 64
    if kind == 63:  # the same entry twice
        again = d.fronts[ring].generation[slot]
        d.entry(ring, Op.SUBMIT, slot, again)
        return
    if kind == 62:
        d.entry(ring, 3 + x[2] % 13, slot, d.fronts[ring].generation[slot])
        return
    if kind == 61:
        d.entry(ring, Op.SUBMIT, c.slots + x[2] % 2, 1)
        return
    if kind == 60:  # older than what was judged
        d.entry(ring, Op.SUBMIT, slot, d.fronts[ring].generation[slot] - 1 - x[2] % 2 & 0xFFFFFF)
        return
    if kind == 59:  # a word whose sequence number is not due
        d.sq(ring, d.fronts[ring].sq_index, x[2] | 1 << 24)
        return
    generation = run.next_generation(ring, slot)
    good = run.descriptor(x, ring, slot, generation)
    if kind < len(FIELDS):
        fields = FIELDS[kind](c, good)
        if x[7] >= 192:  # a rule that is asked about later, mostly, breaks as well: the first one's reason counts
            fields = FIELDS[(kind + 2 + x[6] % 2) % len(FIELDS)](c, good) | fields
        run.post(ring, slot, replace(good, **fields))
        return
    if kind == 57:  # the last token
        tokens, pairs = good.signed[: good.prompt_len - 1], good.signed[good.prompt_len :]
        run.post(ring, slot, replace(good, signed=(*tokens, c.vocab, *pairs)))
        return
    if kind == 58:  # a deadline about as far as the clock goes
        run.post(ring, slot, replace(good, deadline_us=(1 << 64) - 1 - d.now - x[2] % 4))
        return
    run.post(ring, slot, torn(good, kind - len(FIELDS)))
    d.arena(ring, good.prompt_offset, list(good.signed))  # where the payload is torn, its checksum is of another one
    d.fronts[ring].torn.append((slot, good))


def torn(good: Descriptor, kind: int) -> Descriptor:
    """Not all of it is there yet: checksum, generation, or payload."""
    if kind % 3 == 0:
        return replace(good, intact=False)
    if kind % 3 == 1:
        return replace(good, generation=good.generation + 1)
    return replace(good, signed=(*good.signed[:-1], good.signed[-1] + 1))
