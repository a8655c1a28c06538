"""Front ends, host and fake model of a lock-step program: every write goes to the specification and into the words.

A `Driver` runs a program on the specification while it encodes it; it looks at the specification's state to choose what
to do next (a free slot, the credible head), so that the words hold plain numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import EngineState, EventKind, LogKind, Op, StepStatus
from verification.lockstep import observe
from verification.spec.machine import Machine
from verification.spec.ring import GENERATION, entry_word
from verification.spec.state import Descriptor, Mailbox, PlanRow, Request, Result

ARENA, SLOT, SQ, EPOCH, LEASE, CQ_HEAD, BOX, CONTROL, BOUNDARY, POLL, FAULT = range(1, 12)
NONE, NAN_ROW, NO_TOKEN_ROW, FAILED_ROW, LEFT_OUT, BAD_ID, NEGATIVE_ID, UNKNOWN_STATUS, WHOLE_STEP = range(9)
STATUS_OF = {
    NAN_ROW: int(StepStatus.NAN_LOGITS),
    NO_TOKEN_ROW: int(StepStatus.NO_TOKEN),
    FAILED_ROW: int(StepStatus.FAILED),
    UNKNOWN_STATUS: 9,
}


@dataclass(slots=True)
class FrontEnd:
    """What one front end remembers."""

    sq_index: int = 0
    epoch: int = 0
    generation: list[int] = field(default_factory=list)
    torn: list[tuple[int, Descriptor]] = field(default_factory=list)  # (slot, what it should be)
    slow: bool = False  # consumes nothing by itself
    silent: bool = False  # renews no lease by itself


class Driver:
    """Runs one program. `words` is the encoded program, `expected` the records of the specification."""

    def __init__(self, config: EngineConfig, *, watch: bool = False) -> None:
        self.config, self.watch = config, watch
        self.log: list[tuple[int, ...]] = []  # kept for `situations.found` if `watch`
        self.seen: set[str] = set()
        self.machine = Machine(config)
        self.words: list[int] = []
        self.expected: list[int] = []
        self.steps = 0
        self.now = 0
        self.fronts = [FrontEnd(generation=[0] * config.slots) for _ in range(config.rings)]
        self.faults: list[int] = []
        self.results: list[Result] = []
        self.failed = False
        self._held: set[tuple[int, int]] = set()
        self._hash: dict[int, list[int]] = {}
        self._written = [Result(0, 0, StepStatus.FAILED)] * config.max_rows
        self._record(observe.INIT)

    # ---- plain writes

    def arena(self, ring: int, offset: int, values: list[int]) -> None:
        self.machine.rings[ring].memory.arena[offset : offset + len(values)] = values
        self.words += (ARENA, ring, offset, len(values), *values)

    def slot(self, ring: int, slot: int, d: Descriptor) -> None:
        self.machine.rings[ring].memory.slots[slot] = d
        bits = observe.float_bits
        words: tuple[int, ...] = (
            SLOT,
            ring,
            slot,
            int(d.intact),
            d.generation,
            d.prompt_len,
            d.prompt_offset,
            d.max_tokens,
        )
        words += (
            bits(d.temperature),
            bits(d.top_p),
            d.seed,
            d.choice,
            d.flags,
            d.n_stop,
            d.priority,
            observe.signed(d.deadline_us),
        )
        words += (*d.stop_ids, d.tag, d.top_k, bits(d.min_p), bits(d.repetition_penalty), bits(d.presence_penalty))
        words += (bits(d.frequency_penalty), d.min_tokens, d.n_bias, d.logprobs, d.mask_box, len(d.signed), *d.signed)
        self.words += words

    def entry(self, ring: int, op: int, slot: int, generation: int) -> bool:
        """Publishes the next submission word; False if the queue is full."""
        front, memory = self.fronts[ring], self.machine.rings[ring].memory
        if front.sq_index - memory.sq_head >= self.config.sq_entries:
            return False
        self.sq(ring, front.sq_index, entry_word(front.sq_index, op, slot, generation))
        front.sq_index += 1
        return True

    def sq(self, ring: int, index: int, word: int) -> None:
        index %= self.config.sq_entries
        self.machine.rings[ring].memory.sq[index] = word
        self.words += (SQ, ring, index, observe.signed(word))

    def epoch(self, ring: int, value: int) -> None:
        self.machine.rings[ring].memory.epoch = value
        self.words += (EPOCH, ring, observe.signed(value))

    def lease(self, ring: int) -> None:
        memory = self.machine.rings[ring].memory
        memory.lease += 1
        self.words += (LEASE, ring, memory.lease)

    def cq_head(self, ring: int, value: int) -> None:
        self.machine.rings[ring].memory.cq_head = value
        self.words += (CQ_HEAD, ring, value)

    def box(self, ring: int, box: int, ready: int, bits: tuple[int, ...], intact: bool) -> None:
        signed = bits if intact else ()
        self.machine.rings[ring].memory.boxes[box] = Mailbox(ready, bits, signed)
        self.words += (BOX, ring, box, observe.signed(ready), int(intact), *bits)

    def control(self, *, stop: bool) -> None:
        if stop:
            self.machine.stop = 1
        else:
            self.machine.drain = 1
        self.words += (CONTROL, int(stop), 1)

    def fault(self, row: int, kind: int) -> None:
        self.faults.append(kind << 8 | row)
        self.words += (FAULT, kind << 8 | row)

    # ---- calls

    def boundary(self) -> None:
        self.words += (BOUNDARY, self.now)
        rows = self.machine.boundary(self.now, self.results, self.failed)
        self.results, self.failed = self._compute(rows)
        self.faults.clear()
        self._record(observe.LAUNCH if rows else observe.IDLE_BOUNDARY)

    def poll(self) -> None:
        self.words += (POLL, self.now)
        self.machine.poll(self.now)
        self._record(observe.POLL)

    def _record(self, call: int) -> None:
        if self.watch:
            self._look()
        record = observe.observe(self.machine, call)
        self.expected.append(len(record))
        self.expected += record
        self.steps += 1

    def _look(self) -> None:
        """Situations that the log does not show."""
        m, seen, rows = self.machine, self.seen, self.machine.plan or []
        self.log += m.log
        if any(event[3] == EventKind.LOGPROBS for event in m.events):
            seen.add("log-probability events")
        if any(entry[1] == LogKind.EPOCH for entry in m.log) and rows:
            seen.add("epoch change while a step runs")
        if any(q.paused for q in m.running):
            seen.add("row paused")
        if any(q.paused >= self.config.paused_limit for q in m.running):
            seen.add("row paused for long")
        if any(q.paused and len(q.tokens) - q.computed > 1 for q in m.running):
            seen.add("prefill paused for want of pages")
        waiting = [q for r in m.rings for level in r.waiting for q in level]
        if any(q.wants_mask() for q in waiting):
            seen.add("request asleep")
        if any(entry[1] == LogKind.MASK and q.key == entry[2:5] for entry in m.log for q in waiting):
            seen.add("request woken by its mask")
        admitted = [q for q in m.running if any(e[1] == LogKind.ADMIT and q.key == e[2:5] for e in m.log)]
        pairs = [(q, young) for q in waiting for young in admitted if q.ring is young.ring]
        if any(q.wants_mask() and q.order < young.order for q, young in pairs):
            seen.add("request admitted past one asleep")
        if any(not row.sample for row in rows):
            seen.add("chunked prefill")
        if any(row.q_len == 1 for row in rows) and any(row.q_len > 1 for row in rows):
            seen.add("step of a decode and a prefill")
        if len({row.request.ring.index for row in rows}) > 1:
            seen.add("several rings in one step")
        if len({row.request.descriptor.priority for row in rows}) > 1:
            seen.add("several classes in one step")
        if not m.rows:
            seen.add("no row free")
        if not m.free and not m.idle:
            seen.add("no page free")
        if m.engine in (EngineState.DRAINED, EngineState.STOPPED):
            seen.add("drained" if m.engine == EngineState.DRAINED else "stopped")
        if any(deficit > 0 for r in m.rings for deficit in r.deficit) and len(m.rings) > 1:
            seen.add("turn passed with a deficit left")
        held = {(r.index, r.sq_next) for r in m.rings if r.torn_since is not None}
        if any(entry[1] == LogKind.ACCEPT and (entry[2], entry[7]) in self._held for entry in m.log):
            seen.add("torn entry accepted in the end")
        self._held = held

    # ---- the fake model: lockstep.hpp reads what this reads from the tokens out of the KV pages

    def _compute(self, rows: list[PlanRow]) -> tuple[list[Result], bool]:
        failed = any(fault >> 8 == WHOLE_STEP for fault in self.faults)
        results = []
        for at, row in enumerate(rows):
            kind = NONE
            for fault in self.faults:
                if (fault & 255) % len(rows) == at:
                    kind = fault >> 8
            if row.sample and kind != LEFT_OUT:
                self._written[at] = self._sample(row, kind)
                results.append(self._written[at])
            else:  # the token and the log-probability in memory are an older step's
                results.append(replace(self._written[at], status=StepStatus.FAILED))
        return results, failed

    def _sample(self, row: PlanRow, kind: int) -> Result:
        request, vocab = row.request, self.config.vocab
        h = self._context_hash(request, row.context_len)
        token, status = (h >> 4) % vocab, int(StepStatus.OK)
        if request.masked:
            allowed = [t for i in range(vocab) if _allows(request.mask, t := (token + i) % vocab)]
            token, status = (allowed[0], status) if allowed else (token, int(StepStatus.NO_TOKEN))
        token = {BAD_ID: vocab, NEGATIVE_ID: -1}.get(kind, token)
        status = STATUS_OF.get(kind, status)
        count = request.descriptor.logprobs
        tops = tuple(((token + j) % vocab, (h + j) & 0x3FFFFFFF | 0x80000000) for j in range(count))
        return Result(token, h & 0x3FFFFFFF | 0x80000000, status, tops)

    def _context_hash(self, request: Request, length: int) -> int:
        """Of the first tokens; each request's running value is kept."""
        known = self._hash.setdefault(request.arrival, [request.descriptor.seed & 0x7FFFFFFF])
        for position in range(len(known) - 1, length):
            known.append((known[-1] * 33 + request.tokens[position] + 31 * position + 7) & 0x7FFFFFFF)
        return known[length]


def _allows(mask: tuple[int, ...], token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


__all__ = ["GENERATION", "Driver", "FrontEnd", "Op", "replace"]
