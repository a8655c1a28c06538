"""Golden bytes, written by hand from the field table: Python packs them, the C++ scheduler reads and writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import CONFIG, EVENT, LOG_ENTRY, PLAN_ROW, REQUEST, SLOT, STEP_RESULT
from blink_core.abi.enums import EventKind, LogKind, LogLevel, Op, SlotFlag
from blink_core.frontend.ring_client import sq_word
from blink_core.transport.checksum import seal_slot, words_checksum


def parse(text: str) -> bytes:
    """Hexadecimal digits; what follows # on a line is the field's name and value."""
    return bytes.fromhex("".join(line.split("#")[0] for line in text.splitlines()))


GOLDEN_CONFIG = parse(
    """
    3130304b4e494c42 # magic 'BLINK001'
    01000000         # abi_version 1
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
    03000000         # visibility_polls 3
    05000000         # paused_limit 5
    40000000         # log_entries 64
    02000000         # log_level ALL
    02000000         # n_eos 2
    00000000 0b000000 00000000 00000000 00000000 00000000 00000000 00000000 # eos_ids 0, 11
    """
) + bytes(144)

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
    01000000         # flags IGNORE_EOS
    02000000         # n_stop 2
    00000000         # priority 0
    0000000000000000 # deadline_us 0
    05000000 06000000 00000000 00000000 00000000 00000000 00000000 00000000 # stop_ids 5, 6
    8877665544332211 # tag 0x1122334455667788
    f1f17dc4d34bea8c # prompt_checksum of the tokens 1, 2, 12
    5526a188f9d8afa9 # checksum, of the rest
    """
) + bytes(144)

GOLDEN_PROMPT = parse("01000000 02000000 0c000000")
GOLDEN_SUBMIT = parse("010000 21 0034ab12")  # seq 1, op 1 and low digit of slot 2, slot's rest and generation 0x12ab34
GOLDEN_CANCEL = parse("020000 22 0034ab12")  # seq 2, op 2, the same slot and generation

GOLDEN_PLAN_ROW = parse(
    """
    efcdab8967452301 # seed
    02000000         # request: ring 0, slot 2
    34ab1200         # generation
    00000000         # q_start 0
    03000000         # q_len 3
    03000000         # context_len 3
    01000000         # sample 1
    0000003f         # temperature 0.5
    0000403f         # top_p 0.75
    07000000         # choice 7
    00000000         # ring 0
    02000000         # slot 2
    01000000         # n_pages 1
    00000000         # row 0
    00000000         # reserved
    """
)

GOLDEN_TOKEN = parse(
    """
    0100000000000000 # seq 1
    0200             # slot 2
    01               # kind TOKEN
    00               # reason
    34ab1200         # generation
    00000000         # index 0
    09000000         # token 9
    000000bf         # logprob -0.5
    01000000         # step 1
    """
)

GOLDEN_FINISH = parse(
    """
    0200000000000000 # seq 2
    0200             # slot 2
    03               # kind FINISH
    05               # reason CANCELLED
    34ab1200         # generation
    01000000         # index: 1 token emitted
    ffffffff         # token -1
    00000000         # logprob 0
    02000000         # step 2
    """
)

GOLDEN_ACCEPT = parse(
    """
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

CONFIGURATION = EngineConfig(
    vocab=13, eos_ids=(0, 11), rings=2, slots=4, sq_entries=16, cq_entries=32, arena_tokens=96, max_len=24, page_size=4,
    pages=14, max_rows=3, token_budget=8, visibility_polls=3, paused_limit=5, log_entries=64, log_level=LogLevel.ALL,
)  # fmt: skip


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
        "top_p": 0.75, "seed": 0x0123456789ABCDEF, "choice": 7, "flags": SlotFlag.IGNORE_EOS, "n_stop": 2,
        "stop_ids": [5, 6, 0, 0, 0, 0, 0, 0], "tag": 0x1122334455667788,
        "prompt_checksum": words_checksum(np.frombuffer(GOLDEN_PROMPT, "<u4")),
    }  # fmt: skip
    for name, value in values.items():
        slot[name] = value
    seal_slot(slot)
    assert slot.tobytes() == GOLDEN_SLOT
    token = filled(
        EVENT, seq=1, slot=2, kind=EventKind.TOKEN, generation=0x12AB34, index=0, token=9, logprob=-0.5, step=1
    )
    assert token == GOLDEN_TOKEN
    row = filled(
        PLAN_ROW, seed=0x0123456789ABCDEF, request=2, generation=0x12AB34, q_len=3, context_len=3, sample=1,
        temperature=0.5, top_p=0.75, choice=7, slot=2, n_pages=1,
    )  # fmt: skip
    assert row == GOLDEN_PLAN_ROW
    assert filled(LOG_ENTRY, kind=LogKind.ACCEPT, slot=2, generation=0x12AB34, a=3, b=2) == GOLDEN_ACCEPT
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
    # 16 * 8, slots 4 * 256, arena 96 * 4, CQ 32 * 32.
    ring = 256 + 64 + 64
    sq, slots = ring + 128, ring + 128 + 128
    arena = slots + 1024
    cq = arena + 384
    shared[ring : ring + 8] = parse("0100000000000000")  # epoch 1
    scheduler.poll()
    assert shared[ring + 64 : ring + 72] == parse("0100000000000000")  # epoch_ack
    shared[arena + 4 * 17 : arena + 4 * 20] = GOLDEN_PROMPT
    shared[slots + 2 * 256 : slots + 3 * 256] = GOLDEN_SLOT
    shared[sq : sq + 8] = GOLDEN_SUBMIT
    assert scheduler.poll() == 1
    assert shared[ring + 72 : ring + 80] == parse("0100000000000000")  # sq_head
    assert log[2 * 32 : 3 * 32] == GOLDEN_ACCEPT  # after STATE and EPOCH
    assert scheduler.boundary()
    # Plan: header 64, rows 3 * 64, token_ids 8 * 4, positions 8 * 4, kv_slots 8 * 8, results 3 * 16; sections at 64s.
    assert plan[8:24] == parse("01000000 03000000 01000000 00000000")  # one row, three tokens, one sample, status OK
    assert plan[64:128] == GOLDEN_PLAN_ROW
    assert plan[256:268] == GOLDEN_PROMPT
    assert plan[320:332] == parse("00000000 01000000 02000000")  # positions
    assert plan[384:408] == parse("0800000000000000 0900000000000000 0a00000000000000")  # page 2, offsets 0 to 2
    plan[448:460] = parse("09000000 000000bf 00000000")  # token 9, logprob -0.5, OK
    assert scheduler.boundary()
    scheduler.poll()
    assert shared[cq : cq + 32] == GOLDEN_TOKEN
    shared[sq + 8 : sq + 16] = GOLDEN_CANCEL
    scheduler.poll()
    assert shared[cq + 32 : cq + 64] == GOLDEN_FINISH
    assert shared[ring + 80 : ring + 88] == parse("0200000000000000")  # cq_tail
    requests = np.frombuffer(state, REQUEST, 8, layouts["State"].sections["requests"].offset)
    assert requests["tag"][2] == 0x1122334455667788


@pytest.mark.parametrize("byte", range(256))
def test_every_byte_of_a_slot_counts(byte: int) -> None:
    """Catches: a byte of the descriptor that the checksum does not cover."""
    assert verify(GOLDEN_SLOT)
    slot = bytearray(GOLDEN_SLOT)
    slot[byte] ^= 0x10
    assert not verify(bytes(slot))


def test_sizes_of_records() -> None:
    """Catches: a record that grew beyond its fixed size."""
    sizes = [d.itemsize for d in (CONFIG, SLOT, EVENT, REQUEST, LOG_ENTRY, PLAN_ROW, STEP_RESULT)]
    assert sizes == [256, 256, 32, 128, 32, 64, 16]
