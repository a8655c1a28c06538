"""Single definition of every struct and memory region shared between processes or with the GPU.

What a `Struct` and a `Region` are stands in `records`. Source: design sections 3 to 5.
"""

from blink_core.abi.records import Field, Region, Section, Struct

ABI_VERSION = 2
MAGIC = 0x424C494E4B303031  # "BLINK001"
MAX_STOP_IDS = 8
MAX_EOS_IDS = 8
MAX_LOGPROBS = 20  # alternatives of one token, as in the OpenAI API
LOGPROBS_PER_EVENT = 2
PRIORITIES = 4  # classes; 0 is served first
MAX_SLOTS = 4096  # 12 bits of an SQ word
GENERATION_BITS = 24
SEQ_BITS = 24

# One submission-queue word: seq | op | slot | generation, from bit 0. The seq of index i is i % (2^SEQ_BITS - 1) + 1:
# never 0, so that cleared memory is no entry at any index.
SQ_SEQ_SHIFT = 0
SQ_OP_SHIFT = 24
SQ_SLOT_SHIFT = 28
SQ_GENERATION_SHIFT = 40


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
        Field("visibility_us", "u32", "microseconds for which a torn descriptor is read again before ERROR"),
        Field("paused_limit", "u32", "step boundaries in a row without credits or mask after which a row gives way"),
        Field("log_entries", "u32", "event-log entries, power of two"),
        Field("log_level", "u32", "LogLevel"),
        Field("n_eos", "u32", "valid entries of eos_ids"),
        Field("eos_ids", "i32", "end-of-sequence ids", MAX_EOS_IDS),
        Field("admission", "u32", "Admission"),
        Field("prefix_cache", "u32", "1: full pages are shared between requests with equal beginnings"),
        Field("quantum", "u32", "tokens a ring may admit when its turn comes (deficit round robin)"),
        Field("reservation_steps", "u32", "boundaries for which a head that does not fit keeps other rings waiting"),
        Field("lease_us", "u64", "microseconds without a lease change after which a ring's requests end; 0: never"),
        Field("max_bias", "u32", "logit-bias pairs of one request"),
        Field("max_logprobs", "u32", "alternatives of one token, at most MAX_LOGPROBS"),
        Field("masks", "u32", "mask mailboxes of one ring"),
        Field("mask_words", "u32", "32-bit words of one mask: ceil(vocab / 32), 0 without mailboxes"),
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
        Field("torn", "u64", "descriptors or prompts that needed a re-read, all rings"),
    ),
)

FRONT_END_LINE = Struct(
    "FrontEndLine",
    64,
    "Written by the front end, monotone, overwritten in place.",
    (
        Field("epoch", "u64", "of the front end that is attached, or a fence; 0: none (frontend/epoch_word.py)"),
        Field("lease", "u64", "changes at least every Config.lease_us while the front end lives"),
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
        Field("lapses", "u64", "leases of this ring that lapsed with requests alive"),
    ),
)

SLOT = Struct(
    "Slot",
    256,
    "Request descriptor, written by the front end before its SUBMIT entry. Its payload in the arena is the prompt, and "
    "behind it n_bias BiasPair records.",
    (
        Field("generation", "u32", "24 bits, grows with each reuse of the slot"),
        Field("prompt_len", "u32", "tokens"),
        Field("prompt_offset", "u32", "first word of the payload in the ring's arena"),
        Field("max_tokens", "u32", "at least 1"),
        Field("temperature", "f32", "0 means greedy"),
        Field("top_p", "f32", "in (0, 1]"),
        Field("seed", "u64", "Philox key"),
        Field("choice", "u32", "Philox counter word"),
        Field("flags", "u32", "SlotFlag bits"),
        Field("n_stop", "u32", "valid entries of stop_ids"),
        Field("priority", "u32", "class below PRIORITIES, 0 is served first"),
        Field("deadline_us", "u64", "microseconds from acceptance after which the request ends; 0: none"),
        Field("stop_ids", "i32", "stop token ids", MAX_STOP_IDS),
        Field("tag", "u64", "opaque to the engine: joins logs by request"),
        Field("prompt_checksum", "u64", "of the payload's 32-bit words"),
        Field("checksum", "u64", "of this descriptor with this field 0"),
        Field("top_k", "u32", "most probable ids kept; 0: all"),
        Field("min_p", "f32", "in [0, 1]: least probability kept, relative to the greatest"),
        Field("repetition_penalty", "f32", "above 0, 1 changes nothing; prompt and output"),
        Field("presence_penalty", "f32", "output only"),
        Field("frequency_penalty", "f32", "output only"),
        Field("min_tokens", "u32", "end-of-sequence and stop ids are barred before; at most max_tokens"),
        Field("n_bias", "u32", "logit-bias pairs"),
        Field("logprobs", "u32", "alternatives reported with each token"),
        Field("mask_box", "u32", "mailbox of a MASKED request, else 0"),
    ),
)

BIAS_PAIR = Struct(
    "BiasPair",
    8,
    "Added to one token's logit.",
    (Field("token", "i32"), Field("bias", "f32")),
)

MASK_BOX = Struct(
    "MaskBox",
    64,
    "One grammar-mask mailbox, written by the front end after its bits.",
    (
        Field("ready", "u64", "generation << 40 | slot << 28 | output index + 1 that the bits are for"),
        Field("checksum", "u64", "of the bits' 32-bit words"),
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
        Field("token", "i32", "TOKEN: its id; FINISH: prompt tokens that came from the prefix cache; else -1"),
        Field("logprob", "f32", "natural log"),
        Field("step", "u32", "low bits of the step that made it"),
    ),
)

LOGPROBS_EVENT = Struct(
    "LogprobsEvent",
    32,
    "An Event of kind LOGPROBS: alternatives of the TOKEN event that follows, most probable first.",
    (
        Field("seq", "u64", "event index + 1"),
        Field("slot", "u16"),
        Field("kind", "u8", "EventKind.LOGPROBS"),
        Field("count", "u8", "valid pairs"),
        Field("generation", "u32"),
        Field("tokens", "i32", "", LOGPROBS_PER_EVENT),
        Field("logprobs", "f32", "natural log", LOGPROBS_PER_EVENT),
    ),
)

REQUEST = Struct(
    "Request",
    128,
    "Scheduler's own record of a request, index ring * slots + slot.",
    (
        Field("arrival", "u64", "age: grows by one per accepted request"),
        Field("tag", "u64"),
        Field("expires", "u64", "clock at which its deadline passes; 0: never"),
        Field("chain", "u64", "prefix hash of its first `published` pages"),
        Field("generation", "u32", "of the live or last request"),
        Field("judged", "u32", "newest generation accepted or refused: each is judged once"),
        Field("state", "u32", "RequestState"),
        Field("priority", "u32"),
        Field("prompt_len", "u32"),
        Field("max_tokens", "u32"),
        Field("total", "u32", "tokens known: prompt and output"),
        Field("computed", "u32", "tokens whose KV is in pages"),
        Field("emitted", "u32", "TOKEN events"),
        Field("n_pages", "u32", "pages in its block table"),
        Field("published", "u32", "leading pages that are in the prefix cache"),
        Field("cached", "u32", "prompt tokens found in the prefix cache at first admission"),
        Field("next", "i32", "next in its waiting list or -1"),
        Field("row", "i32", "block-table row while RUNNING or -1"),
        Field("preemptions", "u32"),
        Field("paused", "u32", "step boundaries in a row without credits or mask"),
        Field("admitted", "u32", "1 after the first admission"),
        Field("mask_index", "u32", "output index + 1 whose mask lies in its row, or while it waits is there"),
        Field("mask_box", "u32", "mailbox of a MASKED request"),
    ),
)

SAMPLING = Struct(
    "Sampling",
    128,
    "What the model step needs to choose a request's next token, index ring * slots + slot. It may change while a step "
    "runs only for a request that was cancelled meanwhile, whose result is dropped.",
    (
        Field("seed", "u64"),
        Field("temperature", "f32"),
        Field("top_p", "f32"),
        Field("min_p", "f32"),
        Field("top_k", "u32"),
        Field("repetition_penalty", "f32"),
        Field("presence_penalty", "f32"),
        Field("frequency_penalty", "f32"),
        Field("min_tokens", "u32"),
        Field("prompt_len", "u32"),
        Field("n_bias", "u32"),
        Field("logprobs", "u32"),
        Field("flags", "u32"),
        Field("choice", "u32"),
        Field("n_stop", "u32"),
        Field("stop_ids", "i32", "", MAX_STOP_IDS),
    ),
)

RING_STATE = Struct(
    "RingState",
    256,
    "Scheduler's own record of a ring.",
    (
        Field("epoch", "u64"),
        Field("sq_next", "u64", "next submission index to read"),
        Field("cq_tail", "u64", "events written"),
        Field("cq_published", "u64", "events the front end was told of"),
        Field("cq_head", "u64", "last credible front-end head"),
        Field("lease", "u64", "last lease word seen"),
        Field("lease_at", "u64", "clock when it changed"),
        Field("retry_at", "u64", "clock of the first look at the entry at sq_next that found it torn"),
        Field("deficit", "i64", "tokens this ring may still admit in each class", PRIORITIES),
        Field("wait_head", "i32", "oldest waiting request of each class or -1", PRIORITIES),
        Field("wait_tail", "i32", "youngest waiting request of each class or -1", PRIORITIES),
        Field("waiting", "u32"),
        Field("live", "u32", "accepted and not terminal"),
        Field("retries", "u32", "re-reads of the entry at sq_next"),
        Field("torn", "u32", "descriptors or prompts that needed a re-read"),
        Field("duplicates", "u32", "SUBMITs of a generation already accepted, ignored"),
        Field("stale_cancels", "u32", "CANCELs of no live request, ignored"),
        Field("bad_heads", "u32", "front-end heads, 0 aside, that went backwards or beyond the tail, ignored"),
        Field("bad_masks", "u32", "mailboxes whose checksum did not hold, read again"),
        Field("planned", "u32", "event credits used by the plan being made or in flight"),
        Field("lapsed", "u32", "1 while the lease has lapsed"),
    ),
)

PAGE = Struct(
    "Page",
    64,
    "Metadata of one KV page.",
    (
        Field("hash", "u64", "CACHED: chained hash of all tokens up to its end"),
        Field("owner", "i32", "OWNED: request index, else -1"),
        Field("generation", "u32", "of the owner"),
        Field("refs", "u32", "block tables that hold it"),
        Field("state", "u32", "PageState"),
        Field("parent", "u32", "CACHED: the page before it in the prefix, 0 for the first"),
        Field("children", "u32", "CACHED pages whose parent it is"),
        Field("bucket_next", "i32", "next in its hash bucket or -1"),
        Field("lru_prev", "i32", "CACHED without refs: less recently used neighbour or -1"),
        Field("lru_next", "i32", "CACHED without refs: more recently used neighbour or -1"),
    ),
)

STATE_HEADER = Struct(
    "StateHeader",
    256,
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
        Field("committed_pages", "u32", "pages that running requests may need at most"),
        Field("state", "u32", "EngineState"),
        Field("live", "u32", "requests accepted and not terminal, all rings"),
        Field("clock", "u64", "microseconds, as given to the last call"),
        Field("next_expiry", "u64", "no deadline passes before this clock; 0: none is set"),
        Field("logged_clock", "u64", "clock of the newest CLOCK entry of the log"),
        Field("reserved_since", "u64", "boundary at which reserved_for began to keep others waiting"),
        Field("boundaries", "u64", "step boundaries, with and without a step"),
        Field("lookups", "u64", "tokens looked up in the prefix cache"),
        Field("hits", "u64", "tokens found there"),
        Field("evictions", "u64", "cached pages given to others"),
        Field("reserved_for", "i32", "waiting request that does not fit and holds the reservation, or -1"),
        Field("lru_head", "i32", "least recently used cached page without refs or -1"),
        Field("lru_tail", "i32", "most recently used one or -1"),
        Field("idle_cached", "u32", "cached pages without refs"),
        Field("next_ring", "u32", "ring whose turn it is in each class", PRIORITIES),
        Field("clock_due", "u32", "call whose CLOCK entry is due before its first: 1 poll, 2 boundary; 0: none"),
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
    "One request in a step. How its token is chosen stands in State.sampling, index `request`.",
    (
        Field("request", "u32", "request index"),
        Field("generation", "u32"),
        Field("q_start", "u32", "first of its tokens in the step's token arrays"),
        Field("q_len", "u32"),
        Field("context_len", "u32", "KV length after this step"),
        Field("sample", "u32", "1: the last token is sampled from"),
        Field("emitted", "u32", "output index of that token"),
        Field("masked", "u32", "1: only ids whose bit is set in State.masks, index `row`, may be chosen"),
        Field("ring", "u32"),
        Field("slot", "u32"),
        Field("n_pages", "u32", "valid block-table entries"),
        Field("row", "u32", "row of State.block_tables, unchanged while the step runs"),
        Field("serial", "u64", "the request's arrival: no other has it, while generations begin anew with an epoch"),
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
    BIAS_PAIR,
    MASK_BOX,
    EVENT,
    LOGPROBS_EVENT,
    REQUEST,
    SAMPLING,
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
            Section("mask_boxes", "MaskBox", "masks"),
            Section("mask_bits", "u32", "masks * mask_words", "bit i of a mask allows token id i"),
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
            Section("sampling", "Sampling", "rings * slots"),
            Section("bias", "BiasPair", "rings * slots * max_bias", "logit bias by request"),
            Section("running", "u32", "max_rows", "running requests, oldest first"),
            Section("row_stack", "u32", "max_rows", "free block-table rows"),
            Section("block_tables", "u32", "max_rows * max_pages", "page ids by row"),
            Section("pages", "Page", "pages"),
            Section("free_list", "u32", "pages", "stack of free pages"),
            Section("quarantine", "u32", "pages", "pages released while a step runs"),
            Section("buckets", "i32", "pages", "prefix cache: first page of each hash bucket or -1"),
            Section("page_tokens", "i32", "pages * page_size", "prefix cache: tokens of each cached page"),
            Section("masks", "u32", "max_rows * mask_words", "grammar mask by block-table row"),
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
            Section("top_tokens", "i32", "max_rows * max_logprobs", "most probable ids by plan row, best first"),
            Section("top_logprobs", "f32", "max_rows * max_logprobs", "their natural-log probabilities"),
        ),
    ),
)
