"""Single definition of every struct and memory region shared between processes or with the GPU.

A `Struct` is a packed little-endian record whose fields are naturally aligned by construction (checked).
A `Region` is a run of 64-byte aligned sections whose element counts are expressions over `Config`, so the
layout is computed at run time by Python and by C++ from the same text. Source: design sections 3 to 5.
"""

from dataclasses import dataclass

ABI_VERSION = 1
MAGIC = 0x424C494E4B303031  # "BLINK001"
SECTION_ALIGN = 64
MAX_STOP_IDS = 8
MAX_EOS_IDS = 8
MAX_SLOTS = 4096  # 12 bits of an SQ word
GENERATION_BITS = 24
SEQ_BITS = 24

# One submission-queue word: seq | op | slot | generation, from bit 0. The seq of index i is i % (2^SEQ_BITS - 1) + 1:
# never 0, so that cleared memory is no entry at any index.
SQ_SEQ_SHIFT = 0
SQ_OP_SHIFT = 24
SQ_SLOT_SHIFT = 28
SQ_GENERATION_SHIFT = 40

SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i32": 4, "i64": 8, "f32": 4}


@dataclass(frozen=True, slots=True)
class Field:
    """One field: scalar type name of `SIZES`, optional array length, one-line meaning."""

    name: str
    type: str
    doc: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Struct:
    """A record of exactly `size` bytes; fields are laid out in order without implicit padding."""

    name: str
    size: int
    doc: str
    fields: tuple[Field, ...]

    def offsets(self) -> dict[str, int]:
        """Byte offset of each field. Raises ValueError on misalignment or a size that does not match."""
        at, result = 0, {}
        for field in self.fields:
            width = SIZES[field.type]
            if at % width:
                raise ValueError(f"{self.name}.{field.name}: offset {at} is not a multiple of {width}")
            result[field.name] = at
            at += width * field.count
        if at > self.size:
            raise ValueError(f"{self.name}: fields take {at} bytes, declared size is {self.size}")
        return result


@dataclass(frozen=True, slots=True)
class Section:
    """`count` (expression over Config fields) elements of a struct or scalar."""

    name: str
    element: str
    count: str
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """Named sections, each aligned to `SECTION_ALIGN` bytes."""

    name: str
    doc: str
    sections: tuple[Section, ...]


CONFIG = Struct(
    "Config",
    256,
    "Sizes and limits fixed at start: first in the control region, for readers, and first in State, for the scheduler.",
    (
        Field("magic", "u64", "MAGIC"),
        Field("abi_version", "u32", "ABI_VERSION"),
        Field("rings", "u32", "number of rings"),
        Field("slots", "u32", "request slots of one ring, at most MAX_SLOTS"),
        Field("sq_entries", "u32", "submission-queue entries of one ring, power of two"),
        Field("cq_entries", "u32", "completion-queue entries of one ring, power of two"),
        Field("arena_tokens", "u32", "prompt arena of one ring, in tokens"),
        Field("max_len", "u32", "tokens of one request, prompt and output"),
        Field("page_size", "u32", "tokens of one KV page"),
        Field("pages", "u32", "KV pages, the two reserved ones included"),
        Field("max_rows", "u32", "requests running at once"),
        Field("token_budget", "u32", "tokens of one step, at least max_rows"),
        Field("vocab", "u32", "true vocabulary size"),
        Field("max_pages", "u32", "pages of one block table: ceil(max_len / page_size)"),
        Field("visibility_polls", "u32", "re-reads of a torn descriptor before ERROR"),
        Field("paused_limit", "u32", "step boundaries in a row without credits after which a row gives way"),
        Field("log_entries", "u32", "event-log entries, power of two"),
        Field("log_level", "u32", "LogLevel"),
        Field("n_eos", "u32", "valid entries of eos_ids"),
        Field("eos_ids", "i32", "end-of-sequence ids", MAX_EOS_IDS),
    ),
)

CONTROL_LINE = Struct(
    "ControlLine",
    64,
    "Written by the host process (never by a front end).",
    (
        Field("stop_request", "u64", "non-zero: stop now, live requests end with ERROR DRAINING"),
        Field("drain_request", "u64", "non-zero: refuse new requests, finish live ones"),
        Field("pause_request", "u64", "ticket: hold at the next step boundary"),
        Field("pause_release", "u64", "ticket whose hold may end"),
    ),
)

STATUS_LINE = Struct(
    "StatusLine",
    64,
    "Written by the scheduler.",
    (
        Field("state", "u64", "EngineState"),
        Field("pause_ack", "u64", "ticket held now"),
        Field("steps", "u64", "steps committed"),
        Field("failures", "u64", "model steps that raised"),
        Field("heartbeat", "u64", "grows while the scheduler lives"),
    ),
)

FRONT_END_LINE = Struct(
    "FrontEndLine",
    64,
    "Written by the front end, monotone, overwritten in place.",
    (
        Field("epoch", "u64", "grows with each front end that attaches"),
        Field("lease", "u64", "reserved for leases: nobody writes or reads it in this version"),
        Field("cq_head", "u64", "events consumed: credits"),
    ),
)

GPU_LINE = Struct(
    "GpuLine",
    64,
    "Written by the scheduler.",
    (
        Field("epoch_ack", "u64", "epoch whose predecessors' requests are gone"),
        Field("sq_head", "u64", "submission entries taken"),
        Field("cq_tail", "u64", "events published"),
        Field("heartbeat", "u64", "grows while the scheduler lives"),
        Field("state", "u64", "EngineState"),
    ),
)

SLOT = Struct(
    "Slot",
    256,
    "Request descriptor, written by the front end before its SUBMIT entry.",
    (
        Field("generation", "u32", "24 bits, grows with each reuse of the slot"),
        Field("prompt_len", "u32", "tokens"),
        Field("prompt_offset", "u32", "first token in the ring's arena"),
        Field("max_tokens", "u32", "at least 1"),
        Field("temperature", "f32", "0 means greedy"),
        Field("top_p", "f32", "in (0, 1]"),
        Field("seed", "u64", "Philox key"),
        Field("choice", "u32", "Philox counter word"),
        Field("flags", "u32", "SlotFlag bits"),
        Field("n_stop", "u32", "valid entries of stop_ids"),
        Field("priority", "u32", "must be 0 in this version"),
        Field("deadline_us", "u64", "must be 0 in this version"),
        Field("stop_ids", "i32", "stop token ids", MAX_STOP_IDS),
        Field("tag", "u64", "opaque to the engine: joins logs by request"),
        Field("prompt_checksum", "u64", "of the prompt's tokens"),
        Field("checksum", "u64", "of this descriptor with this field 0"),
    ),
)

EVENT = Struct(
    "Event",
    32,
    "Completion-queue event.",
    (
        Field("seq", "u64", "event index + 1"),
        Field("slot", "u16"),
        Field("kind", "u8", "EventKind"),
        Field("reason", "u8", "FinishReason or ErrorReason"),
        Field("generation", "u32"),
        Field("index", "u32", "TOKEN: position in the output; terminal: tokens emitted"),
        Field("token", "i32"),
        Field("logprob", "f32", "natural log"),
        Field("step", "u32", "low bits of the step that made it"),
    ),
)

REQUEST = Struct(
    "Request",
    128,
    "Scheduler's own record of a request, index ring * slots + slot.",
    (
        Field("arrival", "u64", "age: grows by one per accepted request"),
        Field("seed", "u64"),
        Field("tag", "u64"),
        Field("generation", "u32", "of the live or last request"),
        Field("state", "u32", "RequestState"),
        Field("prompt_len", "u32"),
        Field("max_tokens", "u32"),
        Field("total", "u32", "tokens known: prompt and output"),
        Field("computed", "u32", "tokens whose KV is in pages"),
        Field("emitted", "u32", "TOKEN events"),
        Field("n_pages", "u32", "pages owned"),
        Field("next", "i32", "next in the ring's waiting list or -1"),
        Field("row", "i32", "block-table row while RUNNING or -1"),
        Field("preemptions", "u32"),
        Field("paused", "u32", "step boundaries in a row without credits"),
        Field("temperature", "f32"),
        Field("top_p", "f32"),
        Field("choice", "u32"),
        Field("flags", "u32"),
        Field("n_stop", "u32"),
        Field("stop_ids", "i32", "", MAX_STOP_IDS),
        Field("judged", "u32", "newest generation accepted or refused: each is judged once"),
    ),
)

RING_STATE = Struct(
    "RingState",
    128,
    "Scheduler's own record of a ring.",
    (
        Field("epoch", "u64"),
        Field("sq_next", "u64", "next submission index to read"),
        Field("cq_tail", "u64", "events written"),
        Field("cq_published", "u64", "events the front end was told of"),
        Field("cq_head", "u64", "last credible front-end head"),
        Field("wait_head", "i32", "oldest waiting request or -1"),
        Field("wait_tail", "i32", "youngest waiting request or -1"),
        Field("waiting", "u32"),
        Field("live", "u32", "accepted and not terminal"),
        Field("retries", "u32", "re-reads of the entry at sq_next"),
        Field("torn", "u32", "descriptors or prompts that needed a re-read"),
        Field("duplicates", "u32", "SUBMITs of a generation already accepted, ignored"),
        Field("stale_cancels", "u32", "CANCELs of no live request, ignored"),
        Field("bad_heads", "u32", "front-end heads, 0 aside, that went backwards or beyond the tail, ignored"),
        Field("planned", "u32", "token credits used by the plan being made"),
    ),
)

PAGE = Struct(
    "Page",
    16,
    "Metadata of one KV page.",
    (
        Field("owner", "i32", "request index or -1"),
        Field("generation", "u32", "of the owner"),
        Field("refs", "u32", "owners: 0 or 1 until prefixes are shared"),
        Field("state", "u32", "PageState"),
    ),
)

STATE_HEADER = Struct(
    "StateHeader",
    192,
    "Scheduler-wide counters.",
    (
        Field("step", "u64", "steps planned"),
        Field("committed", "u64", "steps committed"),
        Field("arrivals", "u64", "requests accepted"),
        Field("admissions", "u64"),
        Field("preemptions", "u64"),
        Field("tokens", "u64", "tokens emitted"),
        Field("log_tail", "u64", "entries ever logged"),
        Field("in_flight", "u32", "1 while a step runs"),
        Field("free_pages", "u32", "length of free_list"),
        Field("quarantined", "u32", "length of quarantine"),
        Field("running", "u32", "length of running"),
        Field("free_rows", "u32", "length of row_stack"),
        Field("next_ring", "u32", "ring whose head is tried first"),
        Field("state", "u32", "EngineState"),
        Field("live", "u32", "requests accepted and not terminal, all rings"),
    ),
)

LOG_ENTRY = Struct(
    "LogEntry",
    32,
    "One event-log entry.",
    (
        Field("step", "u64", "step being planned or in flight"),
        Field("kind", "u16", "LogKind"),
        Field("ring", "u16"),
        Field("slot", "u32"),
        Field("generation", "u32"),
        Field("a", "u32"),
        Field("b", "u32"),
        Field("c", "u32"),
    ),
)

PLAN_HEADER = Struct(
    "PlanHeader",
    64,
    "One step: what the model computes.",
    (
        Field("step", "u64"),
        Field("n_rows", "u32"),
        Field("n_tokens", "u32"),
        Field("n_samples", "u32", "rows whose last token is sampled from"),
        Field("status", "u32", "StepStatus of the whole step"),
    ),
)

PLAN_ROW = Struct(
    "PlanRow",
    64,
    "One request in a step.",
    (
        Field("seed", "u64"),
        Field("request", "u32", "request index"),
        Field("generation", "u32"),
        Field("q_start", "u32", "first of its tokens in the step's token arrays"),
        Field("q_len", "u32"),
        Field("context_len", "u32", "KV length after this step"),
        Field("sample", "u32", "1: the last token is sampled from"),
        Field("temperature", "f32"),
        Field("top_p", "f32"),
        Field("choice", "u32"),
        Field("ring", "u32"),
        Field("slot", "u32"),
        Field("n_pages", "u32", "valid block-table entries"),
        Field("row", "u32", "row of State.block_tables, unchanged while the step runs"),
    ),
)

STEP_RESULT = Struct(
    "StepResult",
    16,
    "Written by the model step, one per plan row (rows that do not sample are ignored).",
    (
        Field("token", "i32"),
        Field("logprob", "f32"),
        Field("status", "u32", "StepStatus"),
        Field("reserved", "u32"),
    ),
)

STRUCTS: tuple[Struct, ...] = (
    CONFIG,
    CONTROL_LINE,
    STATUS_LINE,
    FRONT_END_LINE,
    GPU_LINE,
    SLOT,
    EVENT,
    REQUEST,
    RING_STATE,
    PAGE,
    STATE_HEADER,
    LOG_ENTRY,
    PLAN_HEADER,
    PLAN_ROW,
    STEP_RESULT,
)

REGIONS: tuple[Region, ...] = (
    Region(
        "Control",
        "One per engine, in shared memory before the rings.",
        (
            Section("config", "Config", "1"),
            Section("control", "ControlLine", "1"),
            Section("status", "StatusLine", "1"),
        ),
    ),
    Region(
        "Ring",
        "One per front-end worker, in shared memory after the control region.",
        (
            Section("front_end", "FrontEndLine", "1"),
            Section("gpu", "GpuLine", "1"),
            Section("sq", "u64", "sq_entries"),
            Section("slots", "Slot", "slots"),
            Section("arena", "i32", "arena_tokens"),
            Section("cq", "Event", "cq_entries"),
        ),
    ),
    Region(
        "State",
        "All scheduler state: flat, pointer-free, engine-owned.",
        (
            Section("config", "Config", "1", "the scheduler's own copy: front ends can write the shared one"),
            Section("header", "StateHeader", "1"),
            Section("rings", "RingState", "rings"),
            Section("requests", "Request", "rings * slots"),
            Section("running", "u32", "max_rows", "running requests, oldest first"),
            Section("row_stack", "u32", "max_rows", "free block-table rows"),
            Section("block_tables", "u32", "max_rows * max_pages", "page ids by row"),
            Section("pages", "Page", "pages"),
            Section("free_list", "u32", "pages", "stack of free pages"),
            Section("quarantine", "u32", "pages", "pages released while a step runs"),
            Section("tokens", "i32", "rings * slots * max_len", "token pool by request"),
        ),
    ),
    Region(
        "Log",
        "Event log, a ring of entries indexed by StateHeader.log_tail.",
        (Section("entries", "LogEntry", "log_entries"),),
    ),
    Region(
        "Plan",
        "The step in flight: written between steps by the scheduler, results by the model step.",
        (
            Section("header", "PlanHeader", "1"),
            Section("rows", "PlanRow", "max_rows"),
            Section("token_ids", "i32", "token_budget"),
            Section("positions", "i32", "token_budget"),
            Section("kv_slots", "i64", "token_budget", "page * page_size + offset"),
            Section("results", "StepResult", "max_rows"),
        ),
    ),
)
