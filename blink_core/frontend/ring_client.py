"""Front-end side of one ring: publishes submissions and cancels, consumes events, returns credits (design 3)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import (
    GENERATION_BITS,
    SEQ_BITS,
    SQ_GENERATION_SHIFT,
    SQ_OP_SHIFT,
    SQ_SLOT_SHIFT,
)
from blink_core.abi.dtypes import BIAS_PAIR, DTYPES, EVENT, LOGPROBS_EVENT, SLOT, Array
from blink_core.abi.enums import EventKind, Op, SlotFlag
from blink_core.abi.params import SamplingParams
from blink_core.frontend.epoch_word import FENCE, number_of, successor, told
from blink_core.frontend.request_slot import describe
from blink_core.transport.checksum import seal_slot, words_checksum
from blink_core.transport.interface import Transport, TransportTimeout, deadline_after

_GENERATIONS = 1 << GENERATION_BITS
_MASK_BOX = DTYPES["MaskBox"]
_LEASE_RENEWALS = 10  # in one lease
_ANY_BOX = -1


class RingFull(Exception):
    """No slot, queue entry or arena space at the moment; says which and how many are in use."""


class ArenaFull(RingFull):
    """No arena space: the engine has still to copy earlier prompts, which it does between two steps."""


class ProtocolError(Exception):
    """The engine broke the ring protocol, e.g. an event out of sequence."""


class Superseded(ProtocolError):
    """Another front end has attached to the ring, which is no longer this client's to write; says by which epoch."""


@dataclass(frozen=True, slots=True)
class Handle:
    """One accepted request: its slot, the slot's generation, its submission-queue index, and its mask mailbox."""

    slot: int
    generation: int
    sq_index: int
    mask_box: int | None = None


def sq_word(index: int, op: int, slot: int, generation: int) -> int:
    """The 8-byte submission entry at `index`. Its sequence number is never 0: cleared memory is no entry."""
    seq = index % ((1 << SEQ_BITS) - 1) + 1
    return seq | op << SQ_OP_SHIFT | slot << SQ_SLOT_SHIFT | generation << SQ_GENERATION_SHIFT


def decode_logprobs(events: Array) -> Array:
    """`events` of `RingClient.poll` as `LogprobsEvent`s over the same bytes; meaningful where the kind is LOGPROBS.

    Each holds the next alternatives, most probable first, of the TOKEN event of its request that follows.
    """
    return events.view(LOGPROBS_EVENT)


class RingClient:
    """Single front end of one ring. Methods may be called from any thread; only one thread polls."""

    def __init__(self, transport: Transport, config: EngineConfig, *, io_timeout: float = 5.0) -> None:
        self.config = config
        self._transport = transport
        layout = config.layouts()["Ring"]
        if transport.nbytes < layout.nbytes:
            raise ProtocolError(f"ring has {transport.nbytes} bytes, its layout needs {layout.nbytes}")
        self._at = {name: section.offset for name, section in layout.sections.items()}
        self._io_timeout = io_timeout
        self._lock = threading.Lock()
        self._lease_lock = threading.Lock()
        self._lease = 0
        # Seconds after which the lease is renewed with the next use of the ring; infinite where leases never lapse.
        self._lease_every = config.lease_us / 1e6 / _LEASE_RENEWALS if config.lease_us else float("inf")
        self._lease_due = float("inf")  # until attached
        # What the epoch word may hold while the ring is this client's: old and new while it writes one.
        self._mine: tuple[int, ...] = ()  # before the first attach
        self._attached = False
        self._forget()

    def _forget(self) -> None:
        """Nothing is published, nothing lives: the state of a new epoch."""
        self._generation = [0] * self.config.slots
        self._free = deque(range(self.config.slots))
        self._live: dict[tuple[int, int], Handle] = {}
        self._cancelled: set[tuple[int, int]] = set()
        self._sq_tail = 0
        self._cq_head = 0
        # Extents in use, oldest first: (submission index, start). The arena is a circular buffer of words.
        self._extents: deque[tuple[int, int]] = deque()
        self._arena_next = 0
        self._free_boxes = deque(range(self.config.masks))

    # ---- transport helpers

    def _write(self, offset: int, data: bytes) -> int:
        return self._transport.post_write(offset, data)

    def _await(self, work: int) -> bytes:
        """Completion of `work` and of all before it, so that no failed write goes unseen."""
        return self._transport.wait(work, deadline_after(self._io_timeout))

    def _read(self, offset: int, nbytes: int) -> bytes:
        return self._await(self._transport.post_read(offset, nbytes))

    def _word(self, section: str, field: int) -> int:
        return int.from_bytes(self._read(self._at[section] + 8 * field, 8), "little")

    def _set_word(self, section: str, field: int, value: int) -> int:
        return self._write(self._at[section] + 8 * field, value.to_bytes(8, "little"))

    # ---- life cycle

    def attach(self, timeout: float = 10.0) -> int:
        """Takes the ring over with a new epoch; requests of the previous front end are dropped by the engine.

        Returns the epoch's number. Raises TransportTimeout if the engine does not acknowledge it in time, Superseded if
        another front end attaches meanwhile: of several at once the last to write its fence has the ring. After an
        attach that failed, all that writes or takes events raises until one succeeds. No other method may run at the
        same time.

        The word is looked at right before the second clearing and before the epoch. One-sided writes have no condition,
        so a client that is frozen in the few instructions between such a look and its write still makes that write when
        it goes on: another that attached meanwhile can lose an accepted entry to the clearing, or the ring, with the
        entry in it, to the epoch. In the second case it is told by its next operation.
        """
        with self._lock:
            found = self._word("front_end", 0)
            epoch = successor(found)
            fence = epoch | FENCE
            self._mine, self._attached = (found, fence), False
            # Cleared before the fence as well, so that nothing is taken under it.
            self._clear()
            self._set_word("front_end", 0, fence)
            self._expect(fence)
            # A predecessor may live, and write on until it finds another epoch: what it wrote behind the clearing would
            # be taken for this epoch's.
            self._clear()
            with self._lease_lock:
                self._lease = self._word("front_end", 1)
                self._renew()
            deadline = deadline_after(timeout)
            self._expect(fence)
            self._mine = fence, epoch
            self._transport.wait(self._set_word("front_end", 0, epoch), deadline)
            self._mine = (epoch,)
            seen = self._word("gpu", 0)
            while seen != epoch:
                self.check_successor()
                left = deadline - deadline_after(0)
                if left <= 0:
                    what = f"engine did not acknowledge epoch {told(epoch)} within {timeout} s"
                    raise TransportTimeout(f"{what} (it shows {told(seen)})")
                seen = self._transport.wait_word(self._at["gpu"], seen, left)
            self._forget()
            self._attached = True
            return number_of(epoch)

    def _clear(self) -> None:
        """Posts the writes that empty the ring: queue, mailboxes, head."""
        # Entries of the old epoch must not be taken for new ones after the engine resets its indices.
        self._write(self._at["sq"], bytes(8 * self.config.sq_entries))
        # Generations begin anew too: a mask of the old epoch could be taken for a new request's.
        if self.config.masks:
            self._write(self._at["mask_boxes"], bytes(_MASK_BOX.itemsize * self.config.masks))
        self._set_word("front_end", 2, 0)

    def _expect(self, *words: int) -> None:
        """Raises Superseded unless the epoch word is one of `words`; one 8-byte read."""
        found = self._word("front_end", 0)
        if found not in words:
            raise Superseded(
                f"superseded by epoch {number_of(found)}: another front end has attached "
                f"(this one had {number_of(words[-1])})"
            )

    def check_successor(self) -> None:
        """Raises Superseded if another front end has attached since this one did, or since its attach failed; one
        8-byte read. Nothing is asked before the first attach."""
        if self._mine:
            self._expect(*self._mine)

    def check_epoch(self) -> None:
        """Raises Superseded if another front end has attached to the ring since this one did, ProtocolError if the last
        attach failed half way; one 8-byte read. Nothing is asked before the first attach.

        Every operation asks before it writes; `attach` looks for its own fence (see there). One-sided writes have no
        condition, so a client that is frozen between the check and its writes still makes those when it goes on; the
        window is a few instructions, not the freeze, and the next operation raises. Nothing on this side can close it.
        """
        self.check_successor()
        if self._mine and not self._attached:
            raise ProtocolError("the last attach failed half way: the ring is not this client's before one succeeds")

    @property
    def attached(self) -> bool:
        """Whether the last attach succeeded; the ring may have another front end since."""
        return self._attached

    def renew_lease(self) -> None:
        """Changes the lease word. `poll`, `submit` and `cancel` do so often enough; a front end that calls none of them
        for Config.lease_us loses its requests to ERROR LEASE_LOST. Raises Superseded and ProtocolError as `check_epoch`
        does. (`attach` changes it with no look of its own: the lease of another is at most renewed.)"""
        with self._lease_lock:
            self.check_epoch()
            self._renew()

    def _renew(self) -> None:
        # The word is 64 bits wide and never wraps in practice; a foreign value at its top must not stop us.
        self._lease = (self._lease + 1) % (1 << 64)
        self._lease_due = time.monotonic() + self._lease_every
        self._set_word("front_end", 1, self._lease)

    def _keep_lease(self) -> None:
        if time.monotonic() >= self._lease_due:
            self.renew_lease()

    def engine_words(self) -> tuple[int, int]:
        """(heartbeat, EngineState) as the scheduler last published them."""
        return self._word("gpu", 3), self._word("gpu", 4)

    @property
    def live(self) -> int:
        """Requests submitted whose terminal event has not been polled."""
        return len(self._live)

    # ---- submission

    def _reserve_extent(self, words: int) -> int:
        size = self.config.arena_tokens
        if words > size:
            raise ValueError(f"prompt and logit bias of {words} words are larger than the arena of {size}")
        head = self._word("gpu", 1)
        while self._extents and self._extents[0][0] < head:
            self._extents.popleft()
        if not self._extents:
            return 0
        oldest = self._extents[0][1]
        at = self._arena_next
        if at >= oldest:
            if size - at >= words:
                return at
            at = 0
        # One word stays free, so that a full arena is not mistaken for an empty one.
        if oldest - at > words:
            return at
        raise ArenaFull(f"arena of {size} words has no room for {words}")

    def _sq_space(self) -> int:
        return self.config.sq_entries - (self._sq_tail - self._word("gpu", 1))

    def submit(
        self, prompt: Sequence[int] | Array, params: SamplingParams, *, tag: int = 0, masked: bool = False
    ) -> Handle:
        """Publishes one request: payload, descriptor, then entry. "Accepted" means this returned.

        prompt: token ids, int32. masked: each of its tokens needs a grammar mask (`post_mask`); its mailbox is chosen
        here and stands in the handle, unless `params.mask_box` names one. Raises RingFull when there is no slot, entry,
        mailbox or arena space, ValueError for values that the descriptor or the arena cannot hold, Superseded when the
        ring has another front end; everything else is judged by the engine.
        """
        try:
            tokens = np.asarray(prompt, dtype=np.int64)
        except OverflowError as e:
            raise ValueError(f"prompt holds ids beyond 64 bits: {e}") from e
        if tokens.ndim != 1:
            raise ValueError(f"prompt has shape {tokens.shape}, must be one-dimensional")
        if tokens.size and not (int(tokens.min()) >= -(2**31) and int(tokens.max()) < 2**31):
            raise ValueError(f"prompt holds ids from {tokens.min()} to {tokens.max()}, beyond 32 bits")
        slot, bias = describe(params)
        slot["prompt_len"] = tokens.size
        slot["tag"] = tag
        box = params.mask_box
        if box is None and masked:
            if not self.config.masks:
                raise ValueError("a grammar mask is asked for, but the engine has no mask mailboxes")
            box = _ANY_BOX
        return self._submit(slot, tokens.astype("<i4"), bias, box=box)

    def submit_slot(self, slot: Array, tokens: Array, bias: Array | None = None, *, seal: bool = True) -> Handle:
        """Publishes a prepared descriptor; verification uses it to publish malformed ones.

        slot: one-element `Slot` array; generation and prompt_offset are filled in here, and prompt_checksum and
        checksum too unless `seal` is False. tokens: int32 prompt, written to the arena, and behind it `bias`, a
        `BiasPair` array. No mailbox is reserved for it.

        A write that cannot be posted leaves nothing taken. Raises TransportTimeout or TransportError too when a posted
        write does not complete: whether the engine has the request is unknown then, so its slot stays taken until its
        terminal event or the next epoch.
        """
        return self._submit(slot, tokens, np.zeros(0, BIAS_PAIR) if bias is None else bias, seal=seal)

    def _submit(self, slot: Array, tokens: Array, bias: Array, *, seal: bool = True, box: int | None = None) -> Handle:
        payload = np.concatenate((tokens.astype("<i4", copy=False), bias.view("<i4")))
        self._keep_lease()
        with self._lock:
            if not self._free:
                raise RingFull(f"all {self.config.slots} slots are in use")
            # A cancel of every live request must find room as well.
            if self._sq_space() <= len(self._live) + 1:
                raise RingFull(f"submission queue of {self.config.sq_entries} entries is full")
            box = self._pick_box(box)
            if box is not None:
                slot["flags"] |= np.uint32(SlotFlag.MASKED)
                slot["mask_box"] = box
            offset = self._reserve_extent(max(1, payload.size))
            index = self._free[0]
            generation = self._generation[index] % (_GENERATIONS - 1) + 1  # never 0
            slot["generation"], slot["prompt_offset"] = generation, offset
            if seal:
                slot["prompt_checksum"] = words_checksum(payload) if payload.size else 0
                seal_slot(slot)
            self.check_epoch()
            self._write(self._at["arena"] + 4 * offset, payload.tobytes())
            self._write(self._at["slots"] + SLOT.itemsize * index, slot.tobytes())
            handle = Handle(index, generation, self._sq_tail, box)
            work = self._publish(Op.SUBMIT, index, generation)
            # A write that fails above leaves nothing taken.
            self._free.popleft()
            if box is not None:
                self._free_boxes.remove(box)
            self._generation[index] = generation
            self._extents.append((handle.sq_index, offset))
            self._arena_next = offset + max(1, payload.size)
            self._live[index, generation] = handle
        self._await(work)
        return handle

    def publish_entries(self, entries: Sequence[tuple[int, int, int]]) -> int:
        """Publishes (operation, slot, generation) as they are, in this client's order; returns the queue's new tail.

        Verification uses it to publish entries that no front end would, also of unknown operations. Nothing of the
        client's requests changes: events of these entries come from `poll` like any other. Raises RingFull, with
        nothing published, when the queue has no room for all of them.
        """
        with self._lock:
            space = self._sq_space()
            if space < len(entries):
                size = self.config.sq_entries
                raise RingFull(f"{len(entries)} entries for a submission queue with {space} free of {size}")
            self.check_epoch()
            works = [self._publish(operation, slot, generation) for operation, slot, generation in entries]
            tail = self._sq_tail
        for work in works:
            self._await(work)
        return tail

    def _pick_box(self, box: int | None) -> int | None:
        """The mailbox to use; not yet taken."""
        if box is None:
            return None
        if box != _ANY_BOX and not 0 <= box < self.config.masks:
            raise ValueError(f"mask_box is {box}, the engine has {self.config.masks} mailboxes")
        if box == _ANY_BOX and self._free_boxes:
            return self._free_boxes[0]
        if box not in self._free_boxes:
            what = f"all {self.config.masks} mask mailboxes are" if box == _ANY_BOX else f"mask mailbox {box} is"
            raise RingFull(f"{what} in use")
        return box

    def post_mask(self, handle: Handle, index: int, bits: Array) -> bool:
        """Publishes the grammar mask of the token at output position `index`: bits, checksum, then the ready word.

        bits: uint32 [Config.mask_words], bit i % 32 of word i // 32 allows token id i. A mask is taken once, when its
        token is planned; the next one may be posted when that token has been polled. False, and nothing is written, if
        the request has ended. Raises ValueError for a request without mailbox, another shape, or an index that 28 bits
        do not hold; TransportError or TransportTimeout if the writes do not complete.
        """
        if handle.mask_box is None:
            raise ValueError(f"the request in slot {handle.slot} was submitted without masks")
        words = self.config.mask_words
        if bits.dtype != np.uint32 or bits.shape != (words,):
            raise ValueError(f"mask is {bits.dtype} {list(bits.shape)}, must be uint32 [{words}]")
        if not 0 <= index < 2**28 - 1:
            raise ValueError(f"output index is {index}, must be from 0 to {2**28 - 2}")
        at = self._at["mask_boxes"] + _MASK_BOX.itemsize * handle.mask_box
        self._keep_lease()
        with self._lock:
            if (handle.slot, handle.generation) not in self._live:
                return False
            self.check_epoch()
            self._write(self._at["mask_bits"] + 4 * words * handle.mask_box, bits.astype("<u4").tobytes())
            self._write(at + 8, words_checksum(bits).to_bytes(8, "little"))
            work = self._write(at, (handle.generation << 40 | handle.slot << 28 | index + 1).to_bytes(8, "little"))
        self._await(work)
        return True

    def _publish(self, op: int, slot: int, generation: int) -> int:
        at = self._at["sq"] + 8 * (self._sq_tail & (self.config.sq_entries - 1))
        work = self._write(at, sq_word(self._sq_tail, op, slot, generation).to_bytes(8, "little"))
        self._sq_tail += 1
        return work

    def cancel(self, handle: Handle) -> None:
        """Asks for the end of a request; its terminal event still comes. Asking again changes nothing.

        Raises RingFull if the queue is full, TransportError or TransportTimeout if the entry could not be written.
        """
        key = handle.slot, handle.generation
        self._keep_lease()
        with self._lock:
            if key not in self._live or key in self._cancelled:
                return
            if self._sq_space() < 1:
                raise RingFull(f"submission queue of {self.config.sq_entries} entries is full")
            self.check_epoch()
            work = self._publish(Op.CANCEL, handle.slot, handle.generation)
            self._cancelled.add(key)
        self._await(work)

    # ---- completion

    def poll(self, timeout: float, *, consume: bool = True) -> Array:
        """Events published since the last call, as an `Event` array, waiting up to `timeout` seconds for the first.

        Those of kind LOGPROBS are read by `decode_logprobs`. The lease is renewed as long as this waits.
        The tail is read before the events, and credits go back after they have been copied. `consume=False` keeps
        the credits until `release_credits`, so that a test can be a slow front end. Raises Superseded when the ring has
        another front end, whose events these would be, ProtocolError on an event out of sequence.
        """
        tail = self._await_events(timeout)
        count, size = tail - self._cq_head, self.config.cq_entries
        plausible = 0 < count <= size
        raw = self._copy_events(count) if plausible else b""
        # After the copy and before anything is concluded from it: what was read is of this epoch.
        self.check_epoch()
        if count == 0:
            return np.zeros(0, EVENT)
        if not plausible:
            raise ProtocolError(f"completion tail {tail} is not within {size} of head {self._cq_head}")
        events = np.frombuffer(raw, EVENT)
        wrong = events["seq"] != np.arange(self._cq_head + 1, tail + 1, dtype=np.uint64)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ProtocolError(f"event {self._cq_head + 1 + at} carries sequence number {int(events['seq'][at])}")
        self._cq_head = tail
        if consume:
            self._return_credits()
        ended = events[events["kind"] >= EventKind.FINISH]  # FINISH or ERROR
        with self._lock:
            for key in zip(ended["slot"].tolist(), ended["generation"].tolist(), strict=True):
                ended_handle = self._live.pop(key, None)
                if ended_handle is not None:
                    self._cancelled.discard(key)
                    self._free.append(key[0])
                    if ended_handle.mask_box is not None:
                        self._free_boxes.append(ended_handle.mask_box)
        return events

    def _copy_events(self, count: int) -> bytes:
        first = self._cq_head & (self.config.cq_entries - 1)
        part = min(count, self.config.cq_entries - first)
        raw = self._read(self._at["cq"] + EVENT.itemsize * first, EVENT.itemsize * part)
        if part < count:
            raw += self._read(self._at["cq"], EVENT.itemsize * (count - part))
        return raw

    def _await_events(self, timeout: float) -> int:
        """The completion tail, waiting up to `timeout` seconds for it to move."""
        deadline = deadline_after(timeout)
        while True:
            self._keep_lease()
            left = deadline - time.monotonic()
            tail = self._transport.wait_word(
                self._at["gpu"] + 16, self._cq_head, max(0.0, min(left, self._lease_every))
            )
            if tail != self._cq_head or left <= self._lease_every:
                return tail

    def release_credits(self) -> None:
        """Returns the credits of all events polled so far. That write is awaited with the next read or submission."""
        self.check_epoch()
        self._return_credits()

    def _return_credits(self) -> None:
        self._set_word("front_end", 2, self._cq_head)

    def close(self) -> None:
        self._transport.close()
