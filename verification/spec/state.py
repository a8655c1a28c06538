"""What the specification knows: the words others write, requests, rings, pages, counters and the log."""

from __future__ import annotations

from dataclasses import dataclass

from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import PRIORITIES
from blink_core.abi.enums import EngineState, LogKind, LogLevel, PageState, RequestState, SlotFlag

DETAILS = {LogKind.TOKEN, LogKind.PLAN_ROW, *range(LogKind.PAGE_ALLOC, LogKind.STEP)}  # kinds of level ALL only
DETAILS |= set(range(LogKind.PAGE_SHARE, LogKind.CONTROL))
LOW = 0xFFFFFFFF
Key = tuple[int, int, int]  # ring, slot, generation
ENGINE: Key = 0, 0, 0


@dataclass(slots=True)
class Descriptor:
    """One slot as written. `intact`: its checksum holds; `signed`: the words that its payload checksum is of."""

    generation: int = 0
    prompt_len: int = 0
    prompt_offset: int = 0
    max_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    flags: int = 0
    n_stop: int = 0
    priority: int = 0
    deadline_us: int = 0
    stop_ids: tuple[int, ...] = (0,) * 8
    tag: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    n_bias: int = 0
    logprobs: int = 0
    mask_box: int = 0
    intact: bool = False
    signed: tuple[int, ...] = ()


@dataclass(slots=True)
class Mailbox:
    """One mask mailbox. `signed`: the bits its checksum is of."""

    ready: int
    bits: tuple[int, ...]
    signed: tuple[int, ...]


class RingMemory:
    """Words of one ring: those that the front end writes, and the GPU line."""

    def __init__(self, config: EngineConfig) -> None:
        no_bits = (0,) * config.mask_words
        self.sq = [0] * config.sq_entries
        self.slots = [Descriptor() for _ in range(config.slots)]
        self.arena = [0] * config.arena_tokens  # 32-bit words as signed integers
        self.boxes = [Mailbox(0, no_bits, no_bits) for _ in range(config.masks)]
        self.epoch = self.lease = self.cq_head = 0
        self.epoch_ack = self.sq_head = self.cq_tail = 0


class Ring:
    """The scheduler's side of one ring."""

    def __init__(self, index: int, config: EngineConfig) -> None:
        self.index, self.memory = index, RingMemory(config)
        self.judged = [0] * config.slots  # newest generation judged (R6)
        self.requests: list[Request | None] = [None] * config.slots  # live, by slot
        self.waiting: list[list[Request]] = [[] for _ in range(PRIORITIES)]  # by class, oldest first
        self.deficit = [0] * PRIORITIES
        self.epoch = self.sq_next = self.cq_tail = self.cq_published = self.cq_head = 0
        self.lease = self.lease_at = self.lapsed = self.lapses = self.live = self.planned = 0
        self.torn_since: int | None = None
        self.torn = self.duplicates = self.stale_cancels = self.bad_heads = self.bad_masks = 0


class Request:
    """One accepted request (L1)."""

    def __init__(self, ring: Ring, slot: int, descriptor: Descriptor, arrival: int, clock: int) -> None:
        self.ring, self.slot, self.descriptor, self.arrival = ring, slot, descriptor, arrival
        self.generation, self.key = descriptor.generation, (ring.index, slot, descriptor.generation)
        self.expires = min(clock + descriptor.deadline_us, (1 << 64) - 1) if descriptor.deadline_us else 0
        self.tokens = list(descriptor.signed[: descriptor.prompt_len])
        pairs = descriptor.signed[descriptor.prompt_len :]
        self.bias = tuple(zip(pairs[::2], pairs[1::2], strict=True))
        self.state = RequestState.WAITING
        self.pages: list[int] = []
        self.row, self.mask = -1, tuple[int, ...]()
        self.computed = self.emitted = self.published = self.cached = self.preemptions = 0
        self.paused = self.admitted = self.mask_index = 0
        self.order = descriptor.priority, arrival  # L2
        self.event_cost = 1 + (descriptor.logprobs + 1) // 2  # P3
        self.masked = bool(descriptor.flags & SlotFlag.MASKED)

    def wants_mask(self) -> bool:
        """R11: it has run and does not know of the mask of its next output index. If it waits it is asleep."""
        return bool(self.masked and self.admitted and self.mask_index != self.emitted + 1)


@dataclass(slots=True)
class PlanRow:
    """One request in a step."""

    request: Request
    q_start: int
    q_len: int
    context_len: int
    sample: int
    emitted: int


@dataclass(slots=True)
class Result:
    """What the model step wrote for one row; log-probabilities are float bits."""

    token: int
    logprob: int
    status: int
    tops: tuple[tuple[int, int], ...] = ()


class State:
    """Everything of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.rings = [Ring(index, config) for index in range(config.rings)]
        self.stop = self.drain = 0
        self.engine = EngineState.READY
        self.clock = self.heartbeat = 0
        self.call: int | None = None  # 0 in a poll, 1 in a boundary, until its CLOCK is logged (E2)
        self.boundaries = self.step = self.number = self.committed = 0
        self.arrivals = self.admissions = self.preemptions = self.tokens = 0
        self.lookups = self.hits = self.evictions = 0
        self.running: list[Request] = []  # in order of service
        self.rows = list(range(config.max_rows - 1, -1, -1))  # stack of free block-table rows
        self.turn = [config.rings - 1] * PRIORITIES  # A2
        self.reserved: Request | None = None
        self.reserved_since = 0
        self.plan: list[PlanRow] | None = None  # of the step in flight
        self.free = list(range(config.pages - 1, 1, -1))  # K1, K2
        self.quarantine: list[int] = []
        self.page_state = [PageState.RESERVED] * 2 + [PageState.FREE] * (config.pages - 2)
        self.holders = [0] * config.pages  # block tables that a CACHED page is in
        self.cache: dict[tuple[int, tuple[int, ...]], int] = {}  # K6: (page before, tokens) -> page
        self.key: dict[int, tuple[int, tuple[int, ...]]] = {}  # of each CACHED page
        self.idle: dict[int, None] = {}  # CACHED pages without holders, least recently used first
        self.log: list[tuple[int, ...]] = []
        self.events: list[tuple[int, ...]] = []  # (ring, index, fields ...) as they are written

    @property
    def live(self) -> int:
        return sum(ring.live for ring in self.rings)

    def begin(self, call: int, now: int) -> None:
        """T1: a poll (0) or a boundary (1) at `now`, in microseconds."""
        self.call, self.clock = call, max(self.clock, now)  # T2

    def note(self, kind: LogKind, of: Request | Key = ENGINE, a: int = 0, b: int = 0, c: int = 0) -> None:
        """One log entry about a request, given as such or by ring, slot and generation."""
        level = self.config.log_level
        if level == LogLevel.OFF or (level == LogLevel.DECISIONS and kind in DETAILS):
            return
        if level == LogLevel.ALL and self.call is not None:  # E2
            clock, count = (self.clock & LOW, self.clock >> 32), self.boundaries & LOW
            self.log.append((self.number, LogKind.CLOCK, 0, self.call, 0, *clock, count))
            self.call = None
        key = of.key if isinstance(of, Request) else of
        self.log.append((self.number, kind, *key, a & LOW, b & LOW, c & LOW))  # E1
