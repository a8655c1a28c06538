"""Golden bytes, written by hand from the field table: Python packs them, the C++ scheduler reads and writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import (
    BIAS_PAIR,
    DTYPES,
    EVENT,
    LOG_ENTRY,
    LOGPROBS_EVENT,
    PLAN_ROW,
    SAMPLING,
    SLOT,
    STEP_RESULT,
)  # fmt: skip
from blink_core.abi.enums import Admission, EventKind, LogKind, LogLevel, Op, SlotFlag
from blink_core.frontend.ring_client import sq_word
from blink_core.transport.checksum import seal_slot, words_checksum


def parse(text: str) -> bytes:
    """Hexadecimal digits; what follows # on a line is the field's name and value."""
    return bytes.fromhex("".join(line.split("#")[0] for line in text.splitlines()))


GOLDEN_CONFIG = parse(
    """
    3130304b4e494c42 # magic 'BLINK001'
    02000000         # abi_version 2
    02000000         # rings 2
    04000000         # slots 4
    10000000         # sq_entries 16
    20000000         # cq_entries 32
    60000000         # arena_tokens 96
    18000000         # max_len 24
    04000000         # page_size 4
    0e000000         # pages 14
    03000000         # max_rows 3
    08000000         # token_budget 8
    0d000000         # vocab 13
    06000000         # max_pages 6
    07000000         # visibility_us 7
    05000000         # paused_limit 5
    40000000         # log_entries 64
    02000000         # log_level ALL
    02000000         # n_eos 2
    00000000 0b000000 00000000 00000000 00000000 00000000 00000000 00000000 # eos_ids 0, 11
    01000000         # admission RESERVE
    01000000         # prefix_cache 1
    08000000         # quantum 8
    09000000         # reservation_steps 9
    efcdab0000000000 # lease_us 0xabcdef
    02000000         # max_bias 2
    04000000         # max_logprobs 4
    03000000         # masks 3
    01000000         # mask_words 1
    """
) + bytes(104)

GOLDEN_SLOT = parse(
    """
    34ab1200         # generation 0x12ab34
    03000000         # prompt_len 3
    11000000         # prompt_offset 17
    02000000         # max_tokens 2
    0000003f         # temperature 0.5
    0000403f         # top_p 0.75
    efcdab8967452301 # seed 0x0123456789abcdef
    07000000         # choice 7
    05000000         # flags IGNORE_EOS, MASKED
    02000000         # n_stop 2
    01000000         # priority 1
    0000000001000000 # deadline_us 2^32
    05000000 06000000 00000000 00000000 00000000 00000000 00000000 00000000 # stop_ids 5, 6
    8877665544332211 # tag 0x1122334455667788
    53d6457fa44a3ff8 # prompt_checksum of the payload
    0e73624b98547aaf # checksum, of the rest
    0a000000         # top_k 10
    0000803e         # min_p 0.25
    0000c03f         # repetition_penalty 1.5
    000000bf         # presence_penalty -0.5
    0000003e         # frequency_penalty 0.125
    01000000         # min_tokens 1
    01000000         # n_bias 1
    03000000         # logprobs 3
    02000000         # mask_box 2
    """
) + bytes(108)

GOLDEN_PROMPT = parse("01000000 02000000 0c000000")
GOLDEN_BIAS = parse("05000000 0000c03f")  # token 5, bias 1.5
GOLDEN_SUBMIT = parse("010000 21 0034ab12")  # seq 1, op 1 and low digit of slot 2, slot's rest and generation 0x12ab34
GOLDEN_CANCEL = parse("020000 22 0034ab12")  # seq 2, op 2, the same slot and generation
GOLDEN_MASK = parse("ff0f0000")  # ids 0 to 11
GOLDEN_BOX = parse(
    """
    01000020 0034ab12 # ready: output index 0 and 1, slot 2 from bit 28, generation 0x12ab34 from bit 40
    030d4e0c443010c4 # checksum of the bits
    """
) + bytes(48)

GOLDEN_SAMPLING = parse(
    """
    efcdab8967452301 # seed
    0000003f         # temperature 0.5
    0000403f         # top_p 0.75
    0000803e         # min_p 0.25
    0a000000         # top_k 10
    0000c03f         # repetition_penalty 1.5
    000000bf         # presence_penalty -0.5
    0000003e         # frequency_penalty 0.125
    01000000         # min_tokens 1
    03000000         # prompt_len 3
    01000000         # n_bias 1
    03000000         # logprobs 3
    05000000         # flags IGNORE_EOS, MASKED
    07000000         # choice 7
    02000000         # n_stop 2
    05000000 06000000 00000000 00000000 00000000 00000000 00000000 00000000 # stop_ids 5, 6
    """
) + bytes(32)

GOLDEN_PLAN_ROW = parse(
    """
    02000000         # request: ring 0, slot 2
    34ab1200         # generation
    00000000         # q_start 0
    01000000         # q_len 1
    03000000         # context_len 3
    01000000         # sample 1
    00000000         # emitted 0
    01000000         # masked 1
    00000000         # ring 0
    02000000         # slot 2
    01000000         # n_pages 1
    00000000         # row 0
    """
) + bytes(16)

GOLDEN_LOGPROBS = parse(
    """
    0100000000000000 # seq 1
    0200             # slot 2
    02               # kind LOGPROBS
    02               # count 2
    34ab1200         # generation
    09000000 04000000 # tokens 9, 4
    000000bf 000080bf # logprobs -0.5, -1
    0200000000000000 # seq 2
    0200             # slot 2
    02               # kind LOGPROBS
    01               # count 1
    34ab1200         # generation
    03000000 ffffffff # tokens 3 and none
    000000c0 00000000 # logprobs -2 and none
    """
)

GOLDEN_TOKEN = parse(
    """
    0300000000000000 # seq 3
    0200             # slot 2
    01               # kind TOKEN
    00               # reason
    34ab1200         # generation
    00000000         # index 0
    09000000         # token 9
    000000bf         # logprob -0.5
    02000000         # step 2
    """
)

GOLDEN_FINISH = parse(
    """
    0400000000000000 # seq 4
    0200             # slot 2
    03               # kind FINISH
    05               # reason CANCELLED
    34ab1200         # generation
    01000000         # index: 1 token emitted
    00000000         # token: no prompt token came from the cache
    00000000         # logprob 0
    02000000         # step 2
    """
)

GOLDEN_ENTRIES = parse(
    """
    0000000000000000 # step 0
    1700             # kind CLOCK
    0000             # ring 0
    00000000         # slot
    00000000         # generation
    07000000         # a: clock 7, low half
    03000000         # b: high half 3
    00000000         # c
    0000000000000000 # step 0
    1900             # kind SQ_ENTRY
    0000             # ring 0
    02000000         # slot 2
    34ab1200         # generation
    01000021         # a: low half of the word
    0034ab12         # b: high half
    00000000         # c: submission index 0
    0000000000000000 # step 0
    0100             # kind ACCEPT
    0000             # ring 0
    02000000         # slot 2
    34ab1200         # generation
    03000000         # a: prompt_len 3
    02000000         # b: max_tokens 2
    00000000         # c: submission index 0
    """
)

# After the prompt's last token was planned.
GOLDEN_REQUEST = parse(
    """
    0000000000000000 # arrival 0
    8877665544332211 # tag
    0700000004000000 # expires: accepted at 3 * 2^32 + 7, deadline 2^32 later
    0000000000000000 # chain
    34ab1200         # generation
    34ab1200         # judged
    02000000         # state RUNNING
    01000000         # priority 1
    03000000         # prompt_len 3
    02000000         # max_tokens 2
    03000000         # total 3
    02000000         # computed 2
    00000000         # emitted 0
    01000000         # n_pages 1
    00000000         # published 0
    00000000         # cached 0
    ffffffff         # next
    00000000         # row 0
    00000000         # preemptions 0
    00000000         # paused 0
    01000000         # admitted 1
    01000000         # mask_index 1
    02000000         # mask_box 2
    """
) + bytes(20)

GOLDEN_RING_STATE = parse(
    """
    0100000000000000 # epoch 1
    0100000000000000 # sq_next 1
    0000000000000000 # cq_tail
    0000000000000000 # cq_published
    0000000000000000 # cq_head
    2a00000000000000 # lease 42
    0700000003000000 # lease_at: the entry taken at 3 * 2^32 + 7
    0000000000000000 # retry_at
    0000000000000000 0300000000000000 0000000000000000 0000000000000000 # deficit: class 1 has 3 of its quantum of 8
    ffffffff ffffffff ffffffff ffffffff # wait_head
    ffffffff ffffffff ffffffff ffffffff # wait_tail
    00000000         # waiting 0
    01000000         # live 1
    00000000         # retries
    00000000         # torn
    00000000         # duplicates
    00000000         # stale_cancels
    00000000         # bad_heads
    00000000         # bad_masks
    03000000         # planned: a token and two events of alternatives
    00000000         # lapsed
    """
) + bytes(88)

GOLDEN_HEADER = parse(
    """
    0200000000000000 # step 2
    0100000000000000 # committed 1
    0100000000000000 # arrivals 1
    0100000000000000 # admissions 1
    0000000000000000 # preemptions
    0000000000000000 # tokens
    1000000000000000 # log_tail 16
    01000000         # in_flight 1
    0b000000         # free_pages 11
    00000000         # quarantined
    01000000         # running 1
    02000000         # free_rows 2
    01000000         # committed_pages 1
    01000000         # state READY
    01000000         # live 1
    0a00000003000000 # clock 3 * 2^32 + 10
    0700000004000000 # next_expiry
    0a00000003000000 # logged_clock
    0000000000000000 # reserved_since
    0200000000000000 # boundaries 2
    0000000000000000 # lookups
    0000000000000000 # hits
    0000000000000000 # evictions
    ffffffff         # reserved_for
    ffffffff         # lru_head
    ffffffff         # lru_tail
    00000000         # idle_cached
    01000000 00000000 01000000 01000000 # next_ring: class 1 is at ring 0, the others before their first turn
    00000000         # clock_due: of the newest call it is logged
    """
) + bytes(68)

GOLDEN_PAGE = parse(
    """
    0000000000000000 # hash
    02000000         # owner: request 2
    34ab1200         # generation
    01000000         # refs 1
    01000000         # state OWNED
    00000000         # parent
    00000000         # children
    ffffffff         # bucket_next
    ffffffff         # lru_prev
    ffffffff         # lru_next
    """
) + bytes(20)

CONFIGURATION = EngineConfig(
    vocab=13, eos_ids=(0, 11), rings=2, slots=4, sq_entries=16, cq_entries=32, arena_tokens=96, max_len=24, page_size=4,
    pages=14, max_rows=3, token_budget=8, visibility_us=7, paused_limit=5, log_entries=64, log_level=LogLevel.ALL,
    admission=Admission.RESERVE, quantum=8, reservation_steps=9, lease_us=0xABCDEF, max_bias=2, max_logprobs=4, masks=3,
)  # fmt: skip
LATER = 3 << 32  # the clock needs both halves of its words


def filled(dtype: np.dtype[Any], **fields: Any) -> bytes:
    record = np.zeros(1, dtype)
    for name, value in fields.items():
        record[name] = value
    return record.tobytes()


def verify(slot: bytes) -> bool:
    """Whether the checksum at byte 104 is that of the slot with this field 0."""
    total = words_checksum(np.frombuffer(slot[:104] + bytes(8) + slot[112:], "<u4"))
    return total == int.from_bytes(slot[104:112], "little")


def test_python_packs_the_golden_bytes() -> None:
    """Catches: a field moved, widened or renamed in the definition, which header and dtypes would both follow."""
    assert CONFIGURATION.pack().tobytes() == GOLDEN_CONFIG
    assert EngineConfig.unpack(GOLDEN_CONFIG) == CONFIGURATION
    slot = np.zeros(1, SLOT)
    values: dict[str, Any] = {
        "generation": 0x12AB34, "prompt_len": 3, "prompt_offset": 17, "max_tokens": 2, "temperature": 0.5,
        "top_p": 0.75, "seed": 0x0123456789ABCDEF, "choice": 7, "flags": SlotFlag.IGNORE_EOS | SlotFlag.MASKED,
        "n_stop": 2, "priority": 1, "deadline_us": 2**32, "stop_ids": [5, 6, 0, 0, 0, 0, 0, 0],
        "tag": 0x1122334455667788, "top_k": 10, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -0.5,
        "frequency_penalty": 0.125, "min_tokens": 1, "n_bias": 1, "logprobs": 3, "mask_box": 2,
        "prompt_checksum": words_checksum(np.frombuffer(GOLDEN_PROMPT + GOLDEN_BIAS, "<u4")),
    }  # fmt: skip
    for name, value in values.items():
        slot[name] = value
    seal_slot(slot)
    assert slot.tobytes() == GOLDEN_SLOT
    assert filled(BIAS_PAIR, token=5, bias=1.5) == GOLDEN_BIAS
    bits = words_checksum(np.frombuffer(GOLDEN_MASK, "<u4"))
    assert filled(DTYPES["MaskBox"], ready=0x12AB34_002_0000001, checksum=bits) == GOLDEN_BOX
    token = filled(EVENT, seq=3, slot=2, kind=EventKind.TOKEN, generation=0x12AB34, token=9, logprob=-0.5, step=2)
    assert token == GOLDEN_TOKEN
    pairs = filled(
        LOGPROBS_EVENT, seq=1, slot=2, kind=EventKind.LOGPROBS, count=2, generation=0x12AB34, tokens=[9, 4],
        logprobs=[-0.5, -1.0],
    )  # fmt: skip
    assert pairs == GOLDEN_LOGPROBS[:32]
    row = filled(
        PLAN_ROW, request=2, generation=0x12AB34, q_len=1, context_len=3, sample=1, masked=1, slot=2, n_pages=1
    )
    assert row == GOLDEN_PLAN_ROW
    record = {n: values[n] for n in SAMPLING.names or ()}
    assert filled(SAMPLING, **record) == GOLDEN_SAMPLING
    assert filled(LOG_ENTRY, kind=LogKind.ACCEPT, slot=2, generation=0x12AB34, a=3, b=2) == GOLDEN_ENTRIES[64:]
    assert filled(STEP_RESULT, token=9, logprob=-0.5) == parse("09000000 000000bf 00000000 00000000")


def test_submission_words() -> None:
    """Catches: a shifted bit field of the submission word, or a sequence number of 0 where it wraps."""
    assert sq_word(0, Op.SUBMIT, 2, 0x12AB34).to_bytes(8, "little") == GOLDEN_SUBMIT
    assert sq_word(1, Op.CANCEL, 2, 0x12AB34).to_bytes(8, "little") == GOLDEN_CANCEL
    assert sq_word(0, Op.SUBMIT, 4095, 0xFFFFFF) == 0xFFFFFF_FFF_1_000001
    assert sq_word(2**24 - 2, Op.SUBMIT, 0, 1) == 0x000001_000_1_FFFFFF
    assert sq_word(2**24 - 1, Op.SUBMIT, 0, 1) == 0x000001_000_1_000001


def test_scheduler_reads_and_writes_the_golden_bytes() -> None:
    """Catches: a C++ struct or region that differs from the field table, also if Python's differs in the same way."""
    layouts = CONFIGURATION.layouts()
    shared = bytearray(CONFIGURATION.shared_nbytes())
    state, log, plan = (bytearray(layouts[n].nbytes) for n in ("State", "Log", "Plan"))
    shared[:256] = GOLDEN_CONFIG
    addresses = [np.frombuffer(b, np.uint8).ctypes.data for b in (shared, state, log, plan)]
    scheduler = _native.Scheduler(*addresses)
    scheduler.init()
    # Offsets by hand. Control: config 256, control line 64, status line 64. Ring: front-end line 64, GPU line 64, SQ
    # 16 * 8, slots 4 * 256, arena 96 * 4, CQ 32 * 32, mailboxes 3 * 64, mask bits 3 * 4.
    ring = 256 + 64 + 64
    sq, slots = ring + 128, ring + 128 + 128
    arena = slots + 1024
    cq = arena + 384
    boxes = cq + 1024
    bits = boxes + 192
    assert len(shared) == ring + 2 * (bits + 64 - ring)
    shared[ring : ring + 16] = parse("0100000000000000 2a00000000000000")  # epoch 1, lease 42
    scheduler.poll(LATER + 5)
    assert shared[ring + 64 : ring + 72] == parse("0100000000000000")  # epoch_ack
    shared[arena + 4 * 17 : arena + 4 * 22] = GOLDEN_PROMPT + GOLDEN_BIAS
    shared[slots + 2 * 256 : slots + 3 * 256] = GOLDEN_SLOT
    shared[sq : sq + 8] = GOLDEN_SUBMIT
    assert scheduler.poll(LATER + 7) == 1
    assert shared[ring + 72 : ring + 80] == parse("0100000000000000")  # sq_head
    assert log[3 * 32 : 6 * 32] == GOLDEN_ENTRIES  # after STATE, CLOCK and EPOCH
    # State: config 256, header 256, rings 2 * 256, requests 8 * 128, sampling 8 * 128, bias 8 * 2 * 8, running 3 * 4,
    # row stack 3 * 4, block tables 3 * 6 * 4, pages 14 * 64, ...: sections at multiples of 64.
    header, rings, requests = 256, 512, 1024
    sampling = requests + 1024
    bias = sampling + 1024
    pages = bias + 128 + 64 + 64 + 128
    assert state[:256] == GOLDEN_CONFIG
    assert state[sampling + 2 * 128 : sampling + 3 * 128] == GOLDEN_SAMPLING
    assert state[bias + 2 * 16 : bias + 2 * 16 + 8] == GOLDEN_BIAS
    # The prompt's first two tokens, while the mask is missing; then its last.
    assert scheduler.boundary(LATER + 8)
    shared[bits + 8 : bits + 12] = GOLDEN_MASK
    shared[boxes + 128 : boxes + 192] = GOLDEN_BOX
    assert scheduler.poll(LATER + 9) == 1
    assert scheduler.boundary(LATER + 10)
    # Plan: header 64, rows 3 * 64, token_ids 8 * 4, positions 8 * 4, kv_slots 8 * 8, results 3 * 16, top_tokens and
    # top_logprobs 3 * 4 * 4 each; sections at 64s.
    assert plan[:24] == parse("0200000000000000 01000000 01000000 01000000 00000000")  # step 2: 1 row, token, sample
    assert plan[64:128] == GOLDEN_PLAN_ROW
    assert plan[256:260] == parse("0c000000")  # token 12
    assert plan[320:324] == parse("02000000")  # position 2
    assert plan[384:392] == parse("0a00000000000000")  # page 2, offset 2
    assert state[requests + 2 * 128 : requests + 3 * 128] == GOLDEN_REQUEST
    assert state[rings : rings + 256] == GOLDEN_RING_STATE
    assert state[header : header + 256] == GOLDEN_HEADER
    assert state[pages + 2 * 64 : pages + 3 * 64] == GOLDEN_PAGE
    masks = pages + 14 * 64 + 64 + 64 + 64 + 14 * 4 * 4 + 32  # free list, quarantine, buckets, page tokens 224 -> 256
    assert state[masks : masks + 4] == GOLDEN_MASK
    assert state[masks + 64 + 2 * 96 : masks + 64 + 2 * 96 + 12] == GOLDEN_PROMPT
    plan[448:460] = parse("09000000 000000bf 00000000")  # token 9, logprob -0.5, OK
    plan[512:524] = parse("09000000 04000000 03000000")  # alternatives
    plan[576:588] = parse("000000bf 000080bf 000000c0")
    shared[boxes + 128 : boxes + 136] = bytes(8)
    assert not scheduler.boundary(LATER + 11)  # nothing to plan without the next mask
    scheduler.poll(LATER + 12)
    assert shared[cq : cq + 64] == GOLDEN_LOGPROBS
    assert shared[cq + 64 : cq + 96] == GOLDEN_TOKEN
    shared[sq + 8 : sq + 16] = GOLDEN_CANCEL
    scheduler.poll(LATER + 13)
    assert shared[cq + 96 : cq + 128] == GOLDEN_FINISH
    assert shared[ring + 80 : ring + 88] == parse("0400000000000000")  # cq_tail


@pytest.mark.parametrize("byte", range(256))
def test_every_byte_of_a_slot_counts(byte: int) -> None:
    """Catches: a byte of the descriptor that the checksum does not cover."""
    assert verify(GOLDEN_SLOT)
    slot = bytearray(GOLDEN_SLOT)
    slot[byte] ^= 0x10
    assert not verify(bytes(slot))


def test_sizes_of_records() -> None:
    """Catches: a record that grew beyond its fixed size."""
    sizes = {name: dtype.itemsize for name, dtype in DTYPES.items() if name[0].isupper()}
    assert sizes == {
        "Config": 256, "ControlLine": 64, "StatusLine": 64, "FrontEndLine": 64, "GpuLine": 64, "Slot": 256,
        "BiasPair": 8, "MaskBox": 64, "Event": 32, "LogprobsEvent": 32, "Request": 128, "Sampling": 128,
        "RingState": 256, "Page": 64, "StateHeader": 256, "LogEntry": 32, "PlanHeader": 64, "PlanRow": 64,
        "StepResult": 16,
    }  # fmt: skip
