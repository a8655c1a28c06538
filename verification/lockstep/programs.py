"""Whole lock-step programs: a configuration and a list of operations, every byte string of which is a valid program.

An operation is 8 bytes, a kind and seven small choices; 0 is always the plainest, so that programs shrink towards plain
ones. `execute` carries a program out on a `Driver`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from blink_core.abi.config import EngineConfig, next_power_of_two
from blink_core.abi.enums import Admission, LogLevel, SlotFlag
from verification.lockstep import faulty
from verification.lockstep.driver import Driver, Op
from verification.spec.ring import GENERATION
from verification.spec.state import Descriptor, Request

CONFIG_BYTES, OP_BYTES = 16, 8
MANY_RINGS = 67  # more than one word of a set of rings holds
FLOATS = (0.0, 0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Program:
    """`shape` is CONFIG_BYTES of configuration choices; each of `ops` OP_BYTES."""

    shape: bytes
    ops: tuple[bytes, ...]

    def config(self) -> EngineConfig:
        return config_of(self.shape)

    def __repr__(self) -> str:
        return f"Program(bytes.fromhex('{self.shape.hex()}'), bytes.fromhex('{b''.join(self.ops).hex()}'))"

    @classmethod
    def parse(cls, shape: bytes, ops: bytes) -> Program:
        return cls(shape, tuple(ops[i : i + OP_BYTES] for i in range(0, len(ops), OP_BYTES)))


def random_program(rng: random.Random, length: int = 40) -> Program:
    """A program without hypothesis, of `length` operations."""
    return Program(rng.randbytes(CONFIG_BYTES), tuple(rng.randbytes(OP_BYTES) for _ in range(length)))


def config_of(shape: bytes) -> EngineConfig:
    """The configuration that the bytes choose; all sizes small enough that every limit is met."""
    s = list(shape)
    slots, page_size, rows = 2 + s[0] % 4, 1 + s[1] % 4, 1 + s[2] % 4
    max_len = (6, 9, 12, 16, 20)[s[3] % 5]
    full = -(-(max_len - 1) // page_size)
    vocab = (5, 7, 11, 40)[s[4] % 4]
    bias = s[5] % 3
    return EngineConfig(
        vocab=vocab,
        eos_ids=((1,), (), (0, 3))[s[6] % 3],
        rings=MANY_RINGS if s[7] == 255 else (1, 2, 1, 3)[s[7] % 4],
        slots=slots,
        sq_entries=next_power_of_two(2 * slots),
        cq_entries=next_power_of_two(slots + rows) << s[8] % 2,
        arena_tokens=slots * (max_len + 2 * bias),
        max_len=max_len,
        page_size=page_size,
        pages=2 + (full, full + 1, full + 3, 2 * full, 4 * full, max(1, full - 1))[s[9] % 6],
        max_rows=rows,
        # 16: between the arrays of a plan there are no gaps.
        token_budget=16 if s[10] // 5 % 8 == 7 else rows + (8, 0, 1, 3, 16)[s[10] % 5],
        visibility_us=1 + s[11] % 5,
        paused_limit=1 + s[11] // 8 % 4,
        log_entries=2048,
        log_level=(LogLevel.ALL, LogLevel.ALL, LogLevel.ALL, LogLevel.DECISIONS, LogLevel.OFF)[s[12] % 5],
        admission=(Admission.OPTIMISTIC, Admission.OPTIMISTIC, Admission.RESERVE)[s[12] // 8 % 3],
        prefix_cache=(1, 1, 0)[s[13] % 3],
        quantum=(4, 1, 16)[s[13] // 8 % 3],
        reservation_steps=1 + s[14] % 5,
        lease_us=1 if s[14] // 8 == 31 else (0, 20)[s[14] // 8 % 2],
        max_bias=bias,
        max_logprobs=s[15] % 5,
        masks=(slots, 0, 1)[s[15] // 8 % 3],
    )


class Runner:
    """Carries out the operations of one program."""

    def __init__(self, config: EngineConfig, *, watch: bool = False) -> None:
        self.d = Driver(config, watch=watch)
        self.config = config
        self.done: Counter[str] = Counter()
        for ring in range(config.rings):
            self.attach(ring)
        self.d.poll()

    # ---- helpers

    def attach(self, ring: int, *, clear: bool = True, epoch: int | None = None) -> None:
        front = self.d.fronts[ring]
        if clear:
            for index, word in enumerate(self.d.machine.rings[ring].memory.sq):
                if word:
                    self.d.sq(ring, index, 0)
            self.d.cq_head(ring, 0)
        front.sq_index, front.torn = 0, []
        front.generation = [0] * self.config.slots
        front.epoch = front.epoch + 1 if epoch is None else epoch
        self.d.epoch(ring, front.epoch)

    def live(self, ring: int) -> list[Request]:
        return [request for request in self.d.machine.rings[ring].requests if request is not None]

    def free_slot(self, ring: int, choice: int) -> int:
        """Mostly a slot without a request, taken or published."""
        front, r = self.d.fronts[ring], self.d.machine.rings[ring]
        free = [
            slot
            for slot in range(self.config.slots)
            if r.requests[slot] is None and r.judged[slot] == front.generation[slot]
        ]
        if choice % 8 == 7 or not free:
            return choice // 8 % self.config.slots
        return free[choice % len(free)]

    def descriptor(self, x: bytes, ring: int, slot: int, generation: int) -> Descriptor:
        """x[2] prompt, x[3] length and output, x[4] flags and priority, x[5], x[6] the rest."""
        c = self.config
        size = c.page_size
        lengths = (1, size, size + 1, 2 * size, 2 * size + 1, c.max_len - 1, c.max_len // 2, 3)
        length = min(max(1, lengths[x[3] % 8]), c.max_len - 1)
        family, split = x[2] % 2, (c.max_len, size, 2 * size - 1, 0)[x[2] // 4 % 4]
        prompt = [(i * i + family + (x[2] if i >= split else 0)) % c.vocab for i in range(length)]
        max_tokens = (1, 2, 3, 4, c.max_len // 2, c.max_len, c.max_len - length, 5)[x[3] // 8 % 8] or 1
        masked = bool(c.masks) and x[4] % 8 == 5
        flags = (0, 0, 1, 1, 2, 1, 3, 0)[x[4] % 8] | (SlotFlag.MASKED if masked else 0)
        extra = x[5]
        n_bias = min(c.max_bias, (0, 0, 1, 2)[extra % 4])
        logprobs = min(c.max_logprobs, (0, 0, 1, 2, 3, 4, 0, 0)[extra // 4 % 8])
        if 1 + (logprobs + 1) // 2 + c.slots > c.cq_entries:
            logprobs = 0
        bias = [v for i in range(n_bias) for v in ((i + extra) % c.vocab, 0x3F800000 + i)]
        stop = tuple((extra + 3 * i) % c.vocab for i in range(8))
        return Descriptor(
            generation=generation,
            prompt_len=length,
            prompt_offset=slot * (c.max_len + 2 * c.max_bias),
            max_tokens=max_tokens,
            temperature=FLOATS[extra // 64],
            top_p=0.5 if extra & 64 else 1.0,
            seed=x[6] // 16 * 0x1_0000_0001,  # both halves count
            choice=extra // 32,
            flags=flags,
            n_stop=(0, 0, 1, 2, 0, 0, 0, 8)[x[6] % 8],
            priority=(0, 0, 0, 0, 1, 1, 2, 3)[x[4] // 8 % 8],
            deadline_us=(0, 0, 0, 0, 0, 3, 12, 1 << 62)[x[4] // 32],
            stop_ids=stop,
            tag=self.d.machine.arrivals,
            top_k=extra // 16,
            min_p=(0.0, 0.5, 0.0, 1.0)[extra // 32 % 4],
            min_tokens=min(max_tokens, (0, 0, 0, 2)[x[6] // 8 % 4]),
            n_bias=n_bias,
            logprobs=logprobs,
            mask_box=slot % c.masks if masked else 0,
            intact=True,
            signed=(*prompt, *bias),
        )

    def post(self, ring: int, slot: int, d: Descriptor, op: int = Op.SUBMIT) -> None:
        """Payload, descriptor, entry."""
        front = self.d.fronts[ring]
        memory = self.d.machine.rings[ring].memory
        if front.sq_index - memory.sq_head >= self.config.sq_entries:
            self.done["submission queue full"] += 1
            return
        room = self.config.arena_tokens - d.prompt_offset
        if room >= 0:
            self.d.arena(ring, d.prompt_offset, list(d.signed)[:room])
        self.d.slot(ring, slot, d)
        self.d.entry(ring, op, slot, d.generation)

    def next_generation(self, ring: int, slot: int, choice: int = 0) -> int:
        """Mostly one more; sometimes the farthest that is newer, so that 24 bits wrap."""
        front = self.d.fronts[ring]
        jump = (1 << 23) - 1 if choice % 4 == 3 else 1
        generation = (front.generation[slot] + jump) & GENERATION
        front.generation[slot] = generation or 1
        return front.generation[slot]

    # ---- operations

    def submit(self, x: bytes) -> None:
        ring = x[1] % self.config.rings
        slot = self.free_slot(ring, x[1] // 4)
        generation = self.next_generation(ring, slot, x[7])
        self.post(ring, slot, self.descriptor(x, ring, slot, generation))

    def burst(self, x: bytes) -> None:
        """Several at once: pressure on rows, pages and credits; x[7] says whether all, or all but the first, want
        masks, which come late."""
        for i in range(2 + x[7] % 3):
            masked = x[7] >= 208 or (x[7] >= 144 and i > 0)
            flags = x[4] & 0xF8 | 5 if masked else x[4]
            self.submit(bytes((*x[:2], x[2] + i & 255, x[3], flags, *x[5:])))

    def bad(self, x: bytes) -> None:
        faulty.submit(self, x)

    def step(self, x: bytes) -> None:
        """The engine's own cycle, with front ends that do what they should."""
        self.d.now += (1, 0, 2, 7)[x[1] % 4]
        for ring, front in enumerate(self.d.fronts):
            if not front.silent:
                self.d.lease(ring)
        for _ in range(1 + x[2] % 3):
            self.d.boundary()
            self.d.poll()
            for ring, front in enumerate(self.d.fronts):
                if not front.slow:
                    self.consume_all(ring)

    def consume_all(self, ring: int) -> None:
        memory = self.d.machine.rings[ring].memory
        if memory.cq_head != memory.cq_tail:
            self.d.cq_head(ring, memory.cq_tail)

    def boundary(self, x: bytes) -> None:
        self.d.now += x[1] % 3
        self.d.boundary()

    def poll(self, x: bytes) -> None:
        self.d.now += (0, 1, 3, 10)[x[1] % 4]
        self.d.poll()

    def cancel(self, x: bytes) -> None:
        ring = x[1] % self.config.rings
        live = self.live(ring)
        front = self.d.fronts[ring]
        if x[2] % 8 < 5 and live:
            request = live[x[3] % len(live)]
            self.d.entry(ring, Op.CANCEL, request.slot, request.generation)
        elif x[2] % 8 < 7:  # one that was just submitted, or is long gone
            slot = x[3] % self.config.slots
            self.d.entry(ring, Op.CANCEL, slot, front.generation[slot] - x[2] % 2 & GENERATION)
        else:
            self.d.entry(ring, Op.CANCEL, 4095 - x[3] % 3, 1)

    def consume(self, x: bytes) -> None:
        memory = self.d.machine.rings[ring := x[1] % self.config.rings].memory
        self.d.cq_head(ring, min(memory.cq_head + x[2] % 5, memory.cq_tail))

    def slow(self, x: bytes) -> None:
        front = self.d.fronts[x[1] % self.config.rings]
        front.slow = not front.slow

    def silent(self, x: bytes) -> None:
        front = self.d.fronts[x[1] % self.config.rings]
        front.silent = not front.silent

    def bad_head(self, x: bytes) -> None:
        r = self.d.machine.rings[ring := x[1] % self.config.rings]
        self.d.cq_head(ring, (r.memory.cq_tail + 1, max(0, r.cq_head - 1), 0, r.cq_tail, 1 << 40)[x[2] % 5])

    def renew(self, x: bytes) -> None:
        self.d.lease(x[1] % self.config.rings)

    def restart(self, x: bytes) -> None:
        ring = x[1] % self.config.rings
        epoch = (None, None, None, 0, 1)[x[2] % 5]
        self.attach(ring, clear=x[3] % 4 != 3, epoch=epoch)

    def fix(self, x: bytes) -> None:
        """The front end finishes what it had torn."""
        ring = x[1] % self.config.rings
        front = self.d.fronts[ring]
        if front.torn:
            slot, d = front.torn.pop(x[2] % len(front.torn))
            self.d.arena(ring, d.prompt_offset, list(d.signed))
            self.d.slot(ring, slot, d)

    def mask(self, x: bytes) -> None:
        """Masks for what is masked; x[3] says which is wrong, and how."""
        for ring in range(self.config.rings):
            for request in [*self.d.machine.running, *self.live(ring)]:
                if request.ring.index == ring and request.masked:
                    self._mask(request, x)

    def _mask(self, request: Request, x: bytes) -> None:
        c, box = self.config, request.descriptor.mask_box
        late = x[3] % 8 == 6
        ready = request.generation << 40 | request.slot << 28 | request.emitted + 1 + late
        pattern = (0x55555555, 0xFFFFFFFF, 0x92492492, 0 if x[3] % 8 == 5 else 3)[x[2] % 4]
        bits = tuple(pattern >> (i + request.emitted) % 3 for i in range(c.mask_words))
        self.d.box(request.ring.index, box, ready, bits, x[3] % 8 != 7)

    def fault(self, x: bytes) -> None:
        self.d.fault(x[1], 1 + x[2] % 8)

    def wait(self, x: bytes) -> None:
        """Time passes: deadlines, leases, visibility."""
        self.d.now += (1, 5, 21, 1 << 33)[x[1] % 4]
        for ring in range(self.config.rings):
            if x[2] >> ring & 1:
                self.d.lease(ring)

    def end(self, x: bytes) -> None:
        """Drain or stop; rare, because nothing much happens afterwards."""
        if x[1] < 128:
            return self.d.control(stop=x[2] % 2 == 1)
        self.step(x)


# Weights in 256ths; the first kinds are the plainest.
KINDS: tuple[tuple[Callable[[Runner, bytes], None], int], ...] = (
    (Runner.step, 76),
    (Runner.submit, 44),
    (Runner.boundary, 14),
    (Runner.poll, 18),
    (Runner.burst, 22),
    (Runner.cancel, 16),
    (Runner.consume, 8),
    (Runner.mask, 12),
    (Runner.slow, 5),
    (Runner.silent, 4),
    (Runner.fault, 8),
    (Runner.bad, 8),
    (Runner.fix, 4),
    (Runner.wait, 5),
    (Runner.renew, 2),
    (Runner.bad_head, 4),
    (Runner.restart, 4),
    (Runner.end, 2),
)
TABLE = [kind for kind, weight in KINDS for _ in range(weight)]
assert len(TABLE) == 256


def execute(program: Program, *, watch: bool = False) -> Runner:
    """Runs a program on the specification; `runner.d` then holds words and expected records.

    `watch` keeps what `situations.found` looks at.
    """
    runner = Runner(program.config(), watch=watch)
    for op in program.ops:
        kind = TABLE[op[0]]
        kind(runner, op)
        runner.done[kind.__name__] += 1
    return runner
