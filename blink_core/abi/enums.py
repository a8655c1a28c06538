"""Enumerations of the ABI. The C++ header is generated from these classes (design section 3)."""

from enum import IntEnum


class Op(IntEnum):
    """Operation of a submission-queue word."""

    SUBMIT = 1
    CANCEL = 2


class EventKind(IntEnum):
    """Kind of a completion-queue event; FINISH and ERROR are terminal."""

    TOKEN = 1
    LOGPROBS = 2  # alternatives of the TOKEN that follows (LogprobsEvent)
    FINISH = 3
    ERROR = 4


class FinishReason(IntEnum):
    """Why a request finished."""

    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3  # max_tokens reached
    CONTEXT = 4  # the model's maximum length reached
    CANCELLED = 5


class ErrorReason(IntEnum):
    """Why a request was refused or broken off."""

    BAD_ENTRY = 1  # unknown operation or slot index beyond the ring's slots
    SLOT_BUSY = 2  # slot still owned by a live request
    BAD_GENERATION = 3  # generation older than the slot's last, or descriptor and entry disagree
    BAD_LENGTH = 4  # prompt empty or too long, max_tokens 0 or beyond the model length
    BAD_EXTENT = 5  # prompt outside the ring's arena
    BAD_TOKEN = 6  # prompt or stop id outside the vocabulary
    BAD_PARAM = 7  # sampling parameter out of range, or a field this version does not support
    CHECKSUM = 8  # descriptor or prompt still torn at the visibility deadline
    NEVER_FITS = 9  # needs more pages than the whole pool
    NAN_LOGITS = 10
    DRAINING = 11  # engine drains or stops
    MODEL_ERROR = 12  # the model step raised
    ENGINE_DEAD = 13  # raised by the client: stale heartbeat or dead process
    DEADLINE = 14  # the request's own deadline passed
    LEASE_LOST = 15  # the front end's lease lapsed
    NO_TOKEN = 16  # bias, mask and barred ids leave nothing to choose


class RequestState(IntEnum):
    """State of one request record."""

    FREE = 0
    WAITING = 1
    RUNNING = 2


class PageState(IntEnum):
    """State of one KV page. Every page is in exactly one state (design section 5)."""

    FREE = 0
    OWNED = 1
    QUARANTINED = 2
    RESERVED = 3  # page 0 (null) and page 1 (written by padding rows)
    CACHED = 4  # in the prefix cache, held by any number of requests


class EngineState(IntEnum):
    """Engine life cycle, published in the control region."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    DRAINED = 3
    STOPPED = 4
    FAILED = 5


class LogLevel(IntEnum):
    """Detail of the event log."""

    OFF = 0
    DECISIONS = 1
    ALL = 2


class LogKind(IntEnum):
    """Kind of an event-log entry; the meaning of a, b, c is given per kind."""

    ACCEPT = 1  # a prompt_len, b max_tokens, c SQ index (low 32 bits)
    REJECT = 2  # a ErrorReason, c SQ index
    ADMIT = 3  # a row, b tokens known, c preemptions so far
    PREEMPT = 4  # a row, b tokens computed, c pages released
    FINISH = 5  # a FinishReason, b tokens emitted, c pages released
    ERROR = 6  # a ErrorReason, b tokens emitted, c pages released
    CANCEL = 7  # a 1 if the request was live, c SQ index
    PAGE_ALLOC = 8  # a page, b index in the request's block table (level ALL)
    PAGE_FREE = 9  # a page, b 1 if quarantined (level ALL)
    PAGE_UNQUARANTINE = 10  # a page (level ALL)
    STEP = 11  # a rows, b tokens, c rows that sample
    TOKEN = 12  # a index, b token (level ALL)
    PLAN_ROW = 13  # a tokens in this step, b context length after it, c row (level ALL)
    EPOCH = 14  # a new epoch (low 32 bits), b requests dropped
    STATE = 15  # a EngineState
    PREFIX_HIT = 16  # a pages found, b tokens found, c row
    RESERVATION = 17  # a 1 taken, 0 given up, 2 enforced by preemption; b boundaries it was held
    LEASE = 18  # a 1 lapsed, 0 renewed; b requests ended
    PAGE_SHARE = 19  # a cached page, b index in the block table, c refs after (level ALL)
    PAGE_UNSHARE = 20  # a cached page, b refs after (level ALL)
    PAGE_PUBLISH = 21  # a page, b index in the prefix, c its parent (level ALL)
    PAGE_EVICT = 22  # a page (level ALL)
    CLOCK = 23  # a call's first: slot 1 of a boundary, 0 of a poll; a low, b high half of the clock, c boundaries (ALL)
    CREDITS = 24  # input: a low, b high half of the front end's head (level ALL)
    SQ_ENTRY = 25  # input: a low, b high half of the word taken, c SQ index (level ALL)
    RESULT = 26  # input: a token, b StepStatus, c bits of the logprob (level ALL)
    MASK = 27  # input: a output index, b mailbox (level ALL)
    CONTROL = 28  # input: a 1 drain, 2 stop


class SlotFlag(IntEnum):
    """Bits of `Slot.flags`."""

    IGNORE_EOS = 1
    NO_PREFIX_CACHE = 2  # neither reads the prefix cache nor adds to it
    MASKED = 4  # every token needs a grammar mask


class Admission(IntEnum):
    """When a waiting request may start (design section 4)."""

    OPTIMISTIC = 0  # pages for the tokens known; later shortage preempts the youngest
    RESERVE = 1  # pages for the longest output of every running request


class StepStatus(IntEnum):
    """Status of one sampled row, written by the model step."""

    OK = 0
    NAN_LOGITS = 1
    FAILED = 2  # also what the scheduler writes beforehand: a row that the model step left out is no result
    NO_TOKEN = 3  # nothing may be chosen
