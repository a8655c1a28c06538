"""Traces of drawn lock-step programs: the log of the compiled scheduler, with every descriptor as it was read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import SQ_OP_SHIFT
from blink_core.abi.dtypes import SLOT, Array
from blink_core.abi.enums import LogKind, LogLevel, Op
from verification.lockstep import driver as words
from verification.lockstep.observe import describe
from verification.lockstep.programs import Program, config_of, execute
from verification.lockstep.run import Native, records
from verification.trace.format import Entry, Header, Trace
from verification.trace.submission import Submission, capture

_FIXED = {words.SQ: 4, words.EPOCH: 3, words.LEASE: 3, words.CQ_HEAD: 3, words.CONTROL: 3, words.FAULT: 2}
_SLOT_FIELDS = (
    "generation prompt_len prompt_offset max_tokens temperature top_p seed choice flags n_stop priority deadline_us"
).split()
_SLOT_FIELDS += [f"stop{i}" for i in range(8)]
_SLOT_FIELDS += (
    "tag top_k min_p repetition_penalty presence_penalty frequency_penalty min_tokens n_bias logprobs mask_box"
).split()
_FLOATS = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}


def logged(program: Program) -> Program:
    """The program with an event log of level ALL, which conformance needs."""
    shape, same = bytearray(program.shape), config_of(program.shape).admission
    for choice in (shape[12], *range(256)):
        shape[12] = choice
        config = config_of(bytes(shape))
        if config.log_level == LogLevel.ALL and config.admission == same:
            break
    return Program(bytes(shape), program.ops)


def trace_of(program: Program, native: Native = _native, *, payloads: bool = True, seed: str = "") -> Trace:
    """Runs a program, whose log level must be ALL, on the compiled scheduler. Raises ValueError for another level."""
    driver = execute(program).d
    notes = {"program": {"shape": program.shape.hex(), "ops": b"".join(program.ops).hex()}}
    return trace_of_words(driver.config, driver.words, native, payloads=payloads, seed=seed, notes=notes)


def trace_of_words(
    config: EngineConfig,
    program: list[int],
    native: Native = _native,
    *,
    payloads: bool = True,
    seed: str = "",
    notes: dict[str, Any] | None = None,
) -> Trace:
    """The same for a program whose words are there already: those of its driver. Raises ValueError as `trace_of`."""
    if config.log_level != LogLevel.ALL:
        raise ValueError(f"the program logs at level {config.log_level}, conformance needs {LogLevel.ALL.name}")
    flat = array("q")
    flat.frombytes(native.run_lockstep(config.pack().tobytes(), array("q", program).tobytes()))
    header = Header(config, "drawn", model="lock-step", rig="none", seed=seed, payloads=payloads, notes=notes or {})
    trace = Trace(replace(header), end={"reason": "the program ended"})
    memory = _Memory(config)
    calls = _calls(program, memory)
    for record in records(flat.tolist()):
        next(calls)  # up to the call that this record follows
        for entry in _log(config, record):
            word = entry[5] | entry[6] << 32
            if entry[1] == LogKind.SQ_ENTRY and word >> SQ_OP_SHIFT & 15 == Op.SUBMIT and entry[3] < config.slots:
                made = memory.capture(len(trace.entries), entry, payloads)
                trace.submissions[made.log_index] = made
            trace.entries.append(entry)
    return trace


class _Memory:
    """Descriptors and arenas as the front ends of the program write them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.slots = np.zeros((config.rings, config.slots), SLOT)
        self.arenas = np.zeros((config.rings, config.arena_tokens), np.uint32)

    def capture(self, log_index: int, entry: Entry, payloads: bool) -> Submission:
        raw = self.slots[entry[2], entry[3] : entry[3] + 1].view(np.uint8).tobytes()
        arena: Array = self.arenas[entry[2]]
        return capture(log_index, entry[7], self.config, raw, arena, payloads=payloads, exact=True)

    def slot(self, program: list[int], at: int) -> int:
        """A SLOT operation; returns where the next one begins."""
        ring, slot, intact = program[at + 1 : at + 4]
        values = program[at + 4 : at + 4 + len(_SLOT_FIELDS)]
        record = np.zeros(1, SLOT)
        for name, value in zip(_SLOT_FIELDS, values, strict=True):
            if name.startswith("stop"):
                record["stop_ids"][0, int(name[4:])] = value
            elif name in _FLOATS:
                record[name] = np.array([value & 0xFFFFFFFF], np.uint32).view(np.float32)
            else:
                record[name] = value & ((1 << 8 * record[name].itemsize) - 1)
        at += 4 + len(_SLOT_FIELDS)
        count = program[at]
        signed = np.array([word & 0xFFFFFFFF for word in program[at + 1 : at + 1 + count]], np.uint32)
        record["prompt_checksum"] = _native.checksum(signed)
        record["checksum"] = np.uint64(_native.checksum(record.view(np.uint32)) + (not intact) & (1 << 64) - 1)
        self.slots[ring, slot] = record[0]
        return at + 1 + count


def _calls(program: list[int], memory: _Memory) -> Iterator[None]:
    """Yields before the first call and at each, when the writes before it are done."""
    at = 0
    yield
    while at < len(program):
        op = program[at]
        if op in (words.BOUNDARY, words.POLL):
            yield
            at += 2
        elif op == words.ARENA:
            ring, offset, count = program[at + 1 : at + 4]
            memory.arenas[ring, offset : offset + count] = np.array(program[at + 4 : at + 4 + count], np.int64)
            at += 4 + count
        elif op == words.SLOT:
            at = memory.slot(program, at)
        elif op == words.BOX:
            at += 5 + memory.config.mask_words
        else:
            at += _FIXED[op]


def _log(config: EngineConfig, record: list[int]) -> list[Entry]:
    named = describe(config, record)
    at = next(i for i, (name, _) in enumerate(named) if name == "len(log)")
    values = [value for _, value in named[at + 1 :]]
    return [tuple(values[i : i + 8]) for i in range(0, len(values), 8)]
