"""`replay`: the recorded inputs on the compiled scheduler, its log compared with the recorded one entry by entry.

The monitor gives the calls; here each is made on a fresh engine in this process, with the recorded results in place of
a model. What the log does not tell and the specification had to infer (when a lease word changed, boundaries that left
no entry, since when an entry was torn) is written into the scheduler's state before the call that it matters for.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import SQ_OP_SHIFT, SQ_SLOT_SHIFT
from blink_core.abi.dtypes import LOG_ENTRY, SLOT, Array
from blink_core.abi.enums import ErrorReason, LogKind, Op, StepStatus
from verification.trace.calls import PollInputs
from verification.trace.format import Entry, Trace, to_entries
from verification.trace.monitor import UNKNOWN, Verdict, check
from verification.trace.script import Call
from verification.trace.submission import INTACT, PAYLOAD, Submission
from verification.trace.words import excerpt, in_words


@dataclass(slots=True)
class Replayed:
    """same: every entry so far is equal. whole: the replay came to the end of the log. verdict: the monitor's."""

    same: bool
    whole: bool
    compared: int
    calls: int
    message: str
    verdict: Verdict


def replay(trace: Trace, native: ModuleType | Any = _native) -> Replayed:
    """Needs payloads and a log from the engine's first entry; else `whole` is False and `message` says why."""
    verdict = check(trace)
    if not trace.header.payloads:
        return Replayed(False, False, 0, 0, "payloads are not in the file (record with --payloads)", verdict)
    if not verdict.calls and verdict.word == UNKNOWN:
        return Replayed(False, False, 0, 0, "; ".join(verdict.reasons), verdict)
    engine, log, at = _Engine(trace, native), trace.entries, 0
    calls = verdict.calls
    for n, call in enumerate([None, *calls]):
        if call is not None:
            engine.make(call)
        for got in engine.new_entries():
            if at == len(log):
                break
            if got != log[at]:
                where = f"entry {at}: recorded {in_words(log[at])}; the scheduler now writes {in_words(got)}"
                return Replayed(False, True, at, n, f"{where}\n{excerpt(log, at, 0)}", verdict)
            at += 1
    if at < len(log):
        reason = verdict.way or "; ".join(verdict.reasons)
        why = f"the calls that are known explain {at} of {len(log)} entries: {verdict.word}, {reason}"
        return Replayed(True, False, at, len(calls), why, verdict)
    return Replayed(True, True, at, len(calls), f"{at} entries are equal", verdict)


class _Engine:
    """One compiled scheduler, called by hand."""

    def __init__(self, trace: Trace, native: Any) -> None:
        config: EngineConfig = trace.header.config
        self.config, self.trace = config, trace
        layouts = config.layouts()
        self.shared = np.zeros(config.shared_nbytes(), np.uint8)
        packed = np.frombuffer(config.pack().tobytes(), np.uint8)
        at = layouts["Control"].sections["config"].offset
        self.shared[at : at + packed.nbytes] = packed
        self.regions = {name: np.zeros(layouts[name].nbytes, np.uint8) for name in ("State", "Log", "Plan")}
        addresses = [self.regions[name].ctypes.data for name in ("State", "Log", "Plan")]
        self.scheduler = native.Scheduler(self.shared.ctypes.data, *addresses)
        self.scheduler.init()
        self.state = layouts["State"].views(self.regions["State"].data)
        self.plan = layouts["Plan"].views(self.regions["Plan"].data)
        self.log: Array = layouts["Log"].view(self.regions["Log"].data, "entries")
        self.control = layouts["Control"].views(self.shared.data)["control"]
        base, each = layouts["Control"].nbytes, layouts["Ring"].nbytes
        self.rings = [layouts["Ring"].views(self.shared.data, base + i * each) for i in range(config.rings)]
        self.signs = [0] * config.rings
        self.read = 0

    def new_entries(self) -> list[Entry]:
        tail, size = int(self.state["header"]["log_tail"][0]), self.config.log_entries
        assert tail - self.read <= size, "one call wrote more entries than the log holds"
        got = to_entries(self.log[np.arange(self.read, tail) & (size - 1)].view(LOG_ENTRY))
        self.read = tail
        return got

    def make(self, call: Call) -> None:
        head = self.state["header"]
        head["boundaries"] = call.boundaries
        self.control["stop_request"], self.control["drain_request"] = call.stop, call.drain
        now = max(call.now, int(head["clock"][0]))
        self._feed(call.polled, now)
        if call.kind == "poll":
            self.scheduler.poll(call.now)
        else:
            self._results(call)
            self.scheduler.boundary(call.now)
        for ring in self.rings:  # what was fed for one call is gone after it, as in the monitor
            ring["sq"][:] = 0
            if len(ring["mask_boxes"]):
                ring["mask_boxes"]["ready"] = 0

    def _results(self, call: Call) -> None:
        head = self.plan["header"]
        head["status"] = StepStatus.FAILED if call.failed else StepStatus.OK
        for place in range(int(head["n_rows"][0])):
            row = self.plan["rows"][place]
            made = call.results.get((int(row["ring"]), int(row["slot"]), int(row["generation"])))
            result = self.plan["results"][place : place + 1]
            if made is None:
                result["status"] = StepStatus.FAILED
                continue
            result["token"], result["status"] = made.token, made.status
            result["logprob"] = np.array([made.logprob], np.uint32).view(np.float32)

    def _feed(self, inputs: PollInputs, now: int) -> None:
        c = self.config
        for index, ring in enumerate(self.rings):
            front, own = ring["front_end"], self.state["rings"][index : index + 1]
            if index in inputs.epochs:
                old = int(front["epoch"][0])
                new = old >> 32 << 32 | inputs.epochs[index]
                front["epoch"], front["cq_head"] = new + (1 << 32) * (new == old), 0
            if index in inputs.credits:
                front["cq_head"] = inputs.credits[index]
            if index in inputs.renewals:
                front["lease"] = int(front["lease"][0]) + 1
            since = now - int(own["lease_at"][0])
            if index in inputs.lapses:
                own["lease_at"] = now - c.lease_us
            elif c.lease_us and int(own["live"][0]) and since >= c.lease_us:
                own["lease_at"] = now
        for j in inputs.entries:
            self._feed_entry(j, now)
        for (r, slot, generation), output, box in inputs.masks:
            memory = self.rings[r]
            words = c.mask_words
            bits = memory["mask_bits"][box * words : (box + 1) * words]
            memory["mask_boxes"]["checksum"][box] = _native.checksum(np.ascontiguousarray(bits))
            memory["mask_boxes"]["ready"][box] = generation << 40 | slot << 28 | output + 1

    def _feed_entry(self, j: int, now: int) -> None:
        log, c = self.trace.entries, self.config
        entry = log[j]
        memory, word = self.rings[entry[2]], entry[5] | entry[6] << 32
        memory["sq"][entry[7] % c.sq_entries] = word
        slot = word >> SQ_SLOT_SHIFT & 4095
        made = self.trace.submissions.get(j)
        if word >> SQ_OP_SHIFT & 15 != Op.SUBMIT or slot >= c.slots or made is None:
            return
        self._write(memory, slot, made)
        after = log[j + 1] if j + 1 < len(log) else None
        torn = (ErrorReason.CHECKSUM, ErrorReason.BAD_GENERATION)
        own = self.state["rings"][entry[2] : entry[2] + 1]
        if after is not None and after[1] == LogKind.REJECT and after[5] in torn:
            own["retries"], own["retry_at"] = 1, max(0, now - c.visibility_us)

    def _write(self, memory: dict[str, Array], slot: int, made: Submission) -> None:
        size = SLOT.itemsize
        memory["slots"].view(np.uint8)[slot * size : (slot + 1) * size] = np.frombuffer(made.slot, np.uint8)
        if made.flags & PAYLOAD and made.flags & INTACT:
            start = int(np.frombuffer(made.slot, SLOT)["prompt_offset"][0])
            arena = memory["arena"].view(np.uint32)
            room = max(0, len(arena) - start)
            words = np.array(made.payload[:room], np.uint32)
            arena[start : start + len(words)] = words
