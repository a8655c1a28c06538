"""Rings: epochs, credits, submissions, masks and publication (R, T4)."""

from __future__ import annotations

from math import isfinite

from blink_core.abi.definition import (
    GENERATION_BITS,
    MAX_STOP_IDS,
    PRIORITIES,
    SEQ_BITS,
    SQ_GENERATION_SHIFT,
    SQ_OP_SHIFT,
    SQ_SLOT_SHIFT,
)
from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason, LogKind, Op, SlotFlag
from verification.spec import kv, life
from verification.spec.state import Descriptor, Request, Ring, State

SEQ = (1 << SEQ_BITS) - 1
GENERATION = (1 << GENERATION_BITS) - 1
KNOWN_FLAGS = SlotFlag.IGNORE_EOS | SlotFlag.NO_PREFIX_CACHE | SlotFlag.MASKED


def entry_word(index: int, op: int, slot: int, generation: int) -> int:
    """R3: the submission word of an index."""
    return index % SEQ + 1 | op << SQ_OP_SHIFT | slot << SQ_SLOT_SHIFT | generation << SQ_GENERATION_SHIFT


def newer(generation: int, than: int) -> bool:  # R6
    return 0 < (generation - than & GENERATION) < 1 << (GENERATION_BITS - 1)


def poll(s: State) -> None:  # T4
    life.deadlines(s)
    for ring in s.rings:
        if ring.memory.epoch != ring.epoch:
            follow_epoch(s, ring)
        elif ring.epoch:  # R2
            credits(s, ring)
            life.lease(s, ring)
            entries(s, ring)
    masks(s)
    for ring in s.rings:  # R9
        ring.memory.sq_head, ring.memory.cq_tail = ring.sq_next, ring.cq_tail
        ring.cq_published = ring.cq_tail
    s.heartbeat += 1


def follow_epoch(s: State, ring: Ring) -> None:  # R2
    gone = [request for request in ring.requests if request is not None]
    for request in gone:
        life.let_go(s, request)
    ring.judged = [0] * s.config.slots
    ring.sq_next = ring.cq_tail = ring.cq_published = ring.cq_head = 0
    ring.deficit = [0] * PRIORITIES
    ring.lapsed, ring.torn_since = 0, None
    s.events = [event for event in s.events if event[0] != ring.index]
    ring.epoch, ring.lease, ring.lease_at = ring.memory.epoch, ring.memory.lease, s.clock
    s.note(LogKind.EPOCH, (ring.index, 0, 0), ring.epoch, len(gone))
    if s.plan is None:
        ring.memory.epoch_ack = ring.epoch


def credits(s: State, ring: Ring) -> None:  # R4
    head = ring.memory.cq_head
    if ring.cq_head <= head <= ring.cq_published:
        if head != ring.cq_head:
            ring.cq_head = head
            s.note(LogKind.CREDITS, (ring.index, 0, 0), head, head >> 32)
    elif head:
        ring.bad_heads += 1


def entries(s: State, ring: Ring) -> None:
    for _ in range(s.config.sq_entries):  # R5
        index = ring.sq_next
        word = ring.memory.sq[index % s.config.sq_entries]
        op, slot = word >> SQ_OP_SHIFT & 15, word >> SQ_SLOT_SHIFT & 4095
        generation = word >> SQ_GENERATION_SHIFT & GENERATION
        credits_needed = ring.cq_tail - ring.cq_head + ring.planned + ring.live + 1
        if word & SEQ != index % SEQ + 1 or (op != Op.CANCEL and credits_needed > s.config.cq_entries):  # R3, R5
            return
        duplicate, reason, torn = judge(s, ring, op, slot, generation)
        if torn:  # R8
            if ring.torn_since is None:
                ring.torn_since = s.clock
                ring.torn += 1
            if s.clock - ring.torn_since < s.config.visibility_us:
                return
        ring.sq_next, ring.torn_since = index + 1, None
        s.note(LogKind.SQ_ENTRY, (ring.index, slot, generation), word, word >> 32, index)
        ring.lease_at = s.clock  # R10
        if op == Op.CANCEL:
            cancel(s, ring, slot, generation, index)
        elif duplicate:
            ring.duplicates += 1
        elif reason is None:
            accept(s, ring, slot, index)
        else:
            refuse(s, ring, slot, generation, index, reason)


def judge(s: State, ring: Ring, op: int, slot: int, generation: int) -> tuple[bool, ErrorReason | None, bool]:
    """R6: whether an entry repeats the newest one judged, why it is refused, and whether only because it is torn."""
    if op != Op.SUBMIT or slot >= s.config.slots:
        return False, ErrorReason.BAD_ENTRY, False
    if generation == ring.judged[slot]:
        return True, None, False
    if not newer(generation, ring.judged[slot]):
        return False, ErrorReason.BAD_GENERATION, False
    if ring.requests[slot] is not None:
        return False, ErrorReason.SLOT_BUSY, False
    if s.engine != EngineState.READY:
        return False, ErrorReason.DRAINING, False
    d = ring.memory.slots[slot]
    if not d.intact or d.generation != generation:
        return False, ErrorReason.BAD_GENERATION if d.intact else ErrorReason.CHECKSUM, True
    reason = bad_field(s, d)
    if reason is not None:
        return False, reason, False
    payload = tuple(ring.memory.arena[d.prompt_offset : d.prompt_offset + d.prompt_len + 2 * d.n_bias])
    if payload != d.signed:
        return False, ErrorReason.CHECKSUM, True
    if any(not 0 <= token < s.config.vocab for token in payload[: d.prompt_len] + payload[d.prompt_len :: 2]):
        return False, ErrorReason.BAD_TOKEN, False
    infinite = any(bits & 0x7F800000 == 0x7F800000 for bits in payload[d.prompt_len + 1 :: 2])  # or NaN
    return False, ErrorReason.BAD_PARAM if infinite else None, False


def bad_field(s: State, d: Descriptor) -> ErrorReason | None:
    """R7: the reason of the first rule that a descriptor breaks."""
    c, masked, end = s.config, d.flags & SlotFlag.MASKED, d.prompt_offset + d.prompt_len
    floats = d.temperature, d.repetition_penalty, d.presence_penalty, d.frequency_penalty
    good = all(map(isfinite, floats)) and d.temperature >= 0 and d.repetition_penalty > 0
    good = good and 0 < d.top_p <= 1 and 0 <= d.min_p <= 1
    good = good and d.min_tokens <= d.max_tokens and d.priority < PRIORITIES and d.n_stop <= MAX_STOP_IDS
    good = good and d.logprobs <= c.max_logprobs and 1 + (d.logprobs + 1) // 2 + c.slots <= c.cq_entries
    good = good and not d.flags & ~KNOWN_FLAGS and (d.mask_box < c.masks if masked else d.mask_box == 0)
    rules = (
        (1 <= d.prompt_len < c.max_len and 1 <= d.max_tokens <= c.max_len, ErrorReason.BAD_LENGTH),
        (end <= c.arena_tokens, ErrorReason.BAD_EXTENT),
        (d.n_bias <= c.max_bias, ErrorReason.BAD_PARAM),
        (end + 2 * d.n_bias <= c.arena_tokens, ErrorReason.BAD_EXTENT),
        (good, ErrorReason.BAD_PARAM),
        (all(0 <= token < c.vocab for token in d.stop_ids[: d.n_stop]), ErrorReason.BAD_TOKEN),
        (kv.most_pages(s, d) <= c.pages - 2, ErrorReason.NEVER_FITS),
    )
    return next((reason for kept, reason in rules if not kept), None)


def accept(s: State, ring: Ring, slot: int, index: int) -> None:  # R10
    d = ring.memory.slots[slot]
    request = ring.requests[slot] = Request(ring, slot, d, s.arrivals, s.clock)
    ring.judged[slot] = d.generation
    s.arrivals += 1
    ring.live += 1
    life.wait(request)
    s.note(LogKind.ACCEPT, request, d.prompt_len, d.max_tokens, index)


def refuse(s: State, ring: Ring, slot: int, generation: int, index: int, reason: ErrorReason) -> None:  # R10
    if reason != ErrorReason.BAD_ENTRY and newer(generation, ring.judged[slot]):
        ring.judged[slot] = generation
    s.note(LogKind.REJECT, (ring.index, slot, generation), reason, 0, index)
    life.write_event(s, ring, slot, EventKind.ERROR, reason, generation, 0, -1, 0, s.step)


def cancel(s: State, ring: Ring, slot: int, generation: int, index: int) -> None:  # R10
    request = ring.requests[slot] if slot < s.config.slots else None
    live = request is not None and request.generation == generation
    if slot < s.config.slots:
        s.note(LogKind.CANCEL, (ring.index, slot, generation), int(live), 0, index)
    if request is not None and live:
        life.end(s, request, FinishReason.CANCELLED)
    else:
        ring.stale_cancels += 1


def masks(s: State) -> None:  # R11
    lists = [s.running, *(level for ring in s.rings for level in ring.waiting)]
    for request in [request for some in lists for request in some if request.wants_mask()]:
        box = request.ring.memory.boxes[request.descriptor.mask_box]
        if box.ready != request.generation << 40 | request.slot << 28 | request.emitted + 1:
            continue
        if box.bits == box.signed:
            request.mask, request.mask_index = box.bits, request.emitted + 1
            s.note(LogKind.MASK, request, request.emitted, request.descriptor.mask_box)
        else:
            request.ring.bad_masks += 1
