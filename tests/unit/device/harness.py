"""One scheduler stepped by hand: raw memory, independent front ends, a scripted model over a tagged KV pool.

The model's next token is a function of the whole context, read back through the block table from a pool in which every
slot carries (submission, position, token). So a wrong page, position or token shows in the step that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind, LogLevel, RequestState, StepStatus
from tests.unit.device import invariants
from tests.unit.device.front_end import FrontEnd, Submission

VOCAB = 13
EOS = 0


def small_config(**fields: Any) -> EngineConfig:
    """Small rings and pool, complete event log."""
    defaults: dict[str, Any] = {
        "vocab": VOCAB,
        "eos_ids": (EOS,),
        "rings": 1,
        "slots": 4,
        "sq_entries": 16,
        "cq_entries": 32,
        "max_len": 24,
        "page_size": 4,
        "pages": 2 + 12,
        "max_rows": 3,
        "token_budget": 8,
        "visibility_polls": 3,
        "paused_limit": 3,
        "log_entries": 1 << 14,
        "log_level": LogLevel.ALL,
    }
    merged = defaults | fields
    merged.setdefault("arena_tokens", merged["slots"] * merged["max_len"])
    return EngineConfig(**merged)


def next_token(context: list[int]) -> int:
    """The scripted model: any change of a token, its position or the length changes the outcome."""
    h = len(context)
    for token in context:
        h = (h * 1103515245 + token + 12345) & 0x7FFFFFFF
    return (h >> 8) % VOCAB


@dataclass
class Planned:
    """One row of the step in flight, resolved to its submission when it was planned."""

    submission: Submission
    sample: bool
    context: list[int]  # tokens whose KV this step leaves in the pages


class Harness:
    """`boundary`, `run_model`, `poll` in any order that the engine could; every call is followed by the checks."""

    def __init__(
        self, config: EngineConfig, *, native: Any = _native, group_size: int = 1, checks: bool = True
    ) -> None:
        self.config, self.checks = config, checks
        layouts = config.layouts()
        # One allocation a region, of exactly its size: an address sanitizer sees a step beyond any end.
        self.shared = np.zeros(config.shared_nbytes(), np.uint8)
        self.shared[: config.pack().nbytes] = np.frombuffer(config.pack().tobytes(), np.uint8)
        self.regions = {name: np.zeros(layouts[name].nbytes, np.uint8) for name in ("State", "Log", "Plan")}
        self.scheduler = native.Scheduler(
            self.shared.ctypes.data, *(self.regions[n].ctypes.data for n in ("State", "Log", "Plan")), group_size
        )
        self.scheduler.init()
        self.state = layouts["State"].views(self.regions["State"].data)
        self.plan = layouts["Plan"].views(self.regions["Plan"].data)
        self.log = layouts["Log"].view(self.regions["Log"].data, "entries")
        self.control = layouts["Control"].views(self.shared.data)
        base = layouts["Control"].nbytes
        self.rings = [
            layouts["Ring"].views(self.shared.data, base + i * layouts["Ring"].nbytes) for i in range(config.rings)
        ]
        self.history: list[Submission] = []
        self.fronts = [FrontEnd(i, config, views, self.history) for i, views in enumerate(self.rings)]
        self.by_key: dict[tuple[int, int, int, int], Submission] = {}
        self.registered = 0
        self.heard = [0] * config.rings  # events looked at, of the ring's epoch
        self.epochs = [0] * config.rings  # as the scheduler follows them
        self.copies: list[dict[int, bytes]] = [{} for _ in self.rings]
        slots = config.pages * config.page_size
        self.kv: list[tuple[int, int, int] | None] = [None] * slots
        self.kv_seen: set[int] = set()
        self.in_flight: list[Planned] = []
        self.log_read = 0
        self.ticks = 0
        self.situations: set[str] = set()
        self.strays: set[tuple[int, int, int]] = set()  # (ring, slot, generation) that may be refused unsubmitted

    # ---- what the engine does

    def attach(self) -> None:
        for front in self.fronts:
            front.attach()
        self.poll()
        assert all(front.acknowledged for front in self.fronts)

    def boundary(self) -> bool:
        before = self._front_end_bytes()
        launched = bool(self.scheduler.boundary())
        self._after(before)
        self.in_flight = []
        if launched:
            self._read_plan()
        if self.checks and int(self.control["control"]["stop_request"][0]) == 0:
            planned = {int(r) for r in self.plan["rows"]["request"][: self.n_rows]} if launched else set()
            invariants.check_progress(self.snapshot(), launched, planned)
        return launched

    def poll(self) -> int:
        before = self._front_end_bytes()
        taken = int(self.scheduler.poll())
        self._after(before)
        return taken

    @property
    def n_rows(self) -> int:
        return int(self.plan["header"]["n_rows"][0])

    def run_model(self, faults: dict[int, str] | None = None, *, failed: bool = False) -> None:
        """Executes the step in flight. `faults`: row -> nan, range (id outside the vocabulary) or unwritten."""
        rows, results = self.plan["rows"], self.plan["results"]
        size = self.config.page_size
        tables = self.state["block_tables"].reshape(self.config.max_rows, self.config.max_pages)
        for i, planned in enumerate(self.in_flight):
            start, count = int(rows[i]["q_start"]), int(rows[i]["q_len"])
            for j in range(start, start + count):
                at = int(self.plan["kv_slots"][j])
                assert at >= invariants.RESERVED * size, f"row {i} writes KV into reserved page {at // size}"
                self.kv[at] = (id(planned.submission), int(self.plan["positions"][j]), int(self.plan["token_ids"][j]))
        for i, planned in enumerate(self.in_flight):
            table = tables[int(rows[i]["row"])].tolist()
            for position, token in enumerate(planned.context):
                found = self.kv[table[position // size] * size + position % size]
                assert found == (id(planned.submission), position, token), (
                    f"row {i}: KV of position {position} holds {found}, expected token {token} of {planned.submission}"
                )
            fault = (faults or {}).get(i)
            if not planned.sample:
                results[i] = (VOCAB + 5, np.nan, StepStatus.NAN_LOGITS, 0)  # must not matter
                continue
            if fault or failed:
                planned.submission.spoiled = True
            if fault == "unwritten":
                continue
            token = next_token(planned.context) if fault != "range" else VOCAB
            status = StepStatus.NAN_LOGITS if fault == "nan" else StepStatus.OK
            results[i] = (token, -0.5, status, 0)
        if failed:
            for planned in self.in_flight:
                planned.submission.spoiled = True
            self.plan["header"]["status"] = StepStatus.FAILED

    def tick(self) -> bool:
        """One plain step: boundary, model, poll, events consumed."""
        self.ticks += 1
        launched = self.boundary()
        if launched:
            self.run_model()
        self.poll()
        for front in self.fronts:
            front.consume()
        return launched

    def settle(self, limit: int = 2000) -> None:
        """Ticks until nothing lives; fails when that takes more than `limit`."""
        for _ in range(limit):
            self.tick()
            if not any(front.live for front in self.fronts):
                break
        else:
            raise AssertionError(f"{[len(f.live) for f in self.fronts]} requests live after {limit} steps")
        self.tick()
        self.finish()

    def settle_only(self, front: FrontEnd, limit: int = 500) -> None:
        """Ticks until this ring's requests have ended, whatever the others do."""
        for _ in range(limit):
            self.tick()
            if not front.live:
                return
        raise AssertionError(f"{len(front.live)} requests of ring {front.index} live after {limit} steps")

    def finish(self) -> None:
        """Everything free, every submission of a current epoch ended once and for a reason that it gave."""
        s = self.snapshot()
        invariants.check_idle(s)
        assert s.header["tokens"] == sum(len(x.tokens) for x in self.history)
        for x in self.history:
            if x.epoch == self.fronts[x.ring].epoch:
                assert x.terminal is not None, f"no terminal event for {x}"

    # ---- what is checked after each call

    def snapshot(self) -> invariants.State:
        return invariants.read(self.config, self.state)

    def _front_end_bytes(self) -> list[bytes]:
        sections = ("front_end", "sq", "slots", "arena")
        return [views[name].tobytes() for views in self.rings for name in sections]

    def _after(self, before: list[bytes]) -> None:
        assert self._front_end_bytes() == before, "the scheduler wrote into memory of the front end"
        for ring in range(self.config.rings):
            self._listen(ring)
        self._follow_log()
        if self.checks:
            invariants.check_all(self.snapshot())

    def _listen(self, ring: int) -> None:
        """Looks at events as they are written, also unpublished ones, and at those that nobody has consumed yet."""
        rs, views, size = self.state["rings"][ring], self.rings[ring], self.config.cq_entries
        if int(rs["epoch"]) != self.epochs[ring]:
            self.epochs[ring], self.heard[ring], self.copies[ring] = int(rs["epoch"]), 0, {}
        tail = int(rs["cq_tail"])
        copies = self.copies[ring]
        for at in [at for at in copies if at < self.fronts[ring].cq_head]:
            del copies[at]
        for at, copy in copies.items():
            assert views["cq"][at % size].tobytes() == copy, f"event {at} was overwritten before it was consumed"
        for at in range(self.heard[ring], tail):
            event = views["cq"][at % size]
            assert int(event["seq"]) == at + 1
            copies[at] = event.tobytes()
            self._event(ring, event)
        assert tail >= self.heard[ring]
        self.heard[ring] = tail
        assert len(copies) <= size

    def _register(self) -> None:
        for x in self.history[self.registered :]:
            self.by_key[x.ring, x.epoch, x.slot, x.generation] = x
        self.registered = len(self.history)

    def find(self, ring: int, slot: int, generation: int) -> Submission | None:
        self._register()
        return self.by_key.get((ring, self.epochs[ring], slot, generation))

    def _event(self, ring: int, event: Any) -> None:
        x = self.find(ring, int(event["slot"]), int(event["generation"]))
        if x is None and (ring, int(event["slot"]), int(event["generation"])) in self.strays:
            assert (event["kind"], event["reason"]) == (EventKind.ERROR, ErrorReason.BAD_ENTRY)
            return
        assert x is not None, f"event {event} of a request that nobody submitted"
        assert x.terminal is None, f"event {event} after the terminal event of {x}"
        kind, reason, index = int(event["kind"]), int(event["reason"]), int(event["index"])
        assert index == len(x.tokens), f"event {event} has index {index}, expected {len(x.tokens)}"
        if kind == EventKind.TOKEN:
            assert x.refusal is None, f"{x} should have been refused"
            assert int(event["token"]) == next_token(x.known), f"token {event} of {x}"
            x.tokens.append(int(event["token"]))
            return
        x.terminal = (kind, reason, index)
        self._judge_end(x, kind, reason)

    def _judge_end(self, x: Submission, kind: int, reason: int) -> None:
        """The terminal reason is the one that the request's own story gives."""
        if kind == EventKind.FINISH:
            assert x.refusal is None, f"{x} finished, should have been refused with {x.refusal}"
            if reason == FinishReason.CANCELLED:
                assert x.cancelled, f"{x} was never cancelled"
                return
            assert reason == self.expected_finish(x), f"{x} ended with {FinishReason(reason).name}"
            return
        assert kind == EventKind.ERROR
        if reason == ErrorReason.DRAINING:
            assert self.control["control"]["drain_request"][0] or self.control["control"]["stop_request"][0]
            self.situations.add("draining")
        elif reason in (ErrorReason.NAN_LOGITS, ErrorReason.MODEL_ERROR):
            assert x.spoiled, f"{x} was no victim of a model fault"
        else:
            assert x.refusal == reason, f"{x} was refused with {ErrorReason(reason).name}, expected {x.refusal}"

    def expected_finish(self, x: Submission) -> FinishReason | None:
        """Why a request with these tokens ends here, or None if it should go on."""
        d = x.descriptor
        if not x.tokens:
            return None
        if x.tokens[-1] == EOS and not int(d["flags"]) & 1:
            return FinishReason.EOS
        if x.tokens[-1] in d["stop_ids"][: int(d["n_stop"])].tolist():
            return FinishReason.STOP_TOKEN
        if len(x.tokens) == int(d["max_tokens"]):
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if len(x.known) == self.config.max_len else None

    def _read_plan(self) -> None:
        """Checks the plan against what is known of each request, and resolves its rows."""
        config, header = self.config, self.plan["header"][0]
        n_rows, n_tokens = int(header["n_rows"]), int(header["n_tokens"])
        rows = self.plan["rows"][:n_rows]
        assert n_rows <= config.max_rows
        assert n_tokens <= config.token_budget, f"{n_tokens} tokens, budget {config.token_budget}"
        assert len(set(rows["request"].tolist())) == n_rows, "a request has two rows"
        assert n_tokens == int(rows["q_len"].sum())
        assert int(header["n_samples"]) == int(rows["sample"].sum())
        tables = self.state["block_tables"].reshape(config.max_rows, config.max_pages)
        at, size = 0, config.page_size
        for row in rows:
            request, count = int(row["request"]), int(row["q_len"])
            x = self.find(int(row["ring"]), int(row["slot"]), int(row["generation"]))
            assert x is not None
            assert x.terminal is None, f"planned after its end: {x}"
            assert request == x.ring * config.slots + x.slot
            q = self.state["requests"][request]
            assert q["state"] == RequestState.RUNNING
            first, known = int(q["computed"]), x.known
            assert int(row["context_len"]) == first + count
            assert bool(row["sample"]) == (first + count == len(known))
            assert (int(row["q_start"]), count > 0) == (at, True)
            for name in ("seed", "temperature", "top_p", "choice"):
                assert row[name] == x.descriptor[name], f"{name} of {x}"
            assert int(row["row"]) == int(q["row"])
            assert int(row["n_pages"]) == int(q["n_pages"]) >= -(-(first + count) // size)
            table = tables[int(row["row"])].tolist()
            for j in range(count):
                position = first + j
                assert int(self.plan["positions"][at + j]) == position
                assert int(self.plan["token_ids"][at + j]) == known[position], f"wrong token at {position} of {x}"
                assert int(self.plan["kv_slots"][at + j]) == table[position // size] * size + position % size
            at += count
            self.in_flight.append(Planned(x, bool(row["sample"]), known[: first + count]))

    def _follow_log(self) -> None:
        """Event log: ACCEPT in order of the submission queue; situations that occurred are collected."""
        tail = int(self.state["header"]["log_tail"][0])
        assert tail - self.log_read <= self.config.log_entries
        for at in range(self.log_read, tail):
            kind = int(self.log[at % self.config.log_entries]["kind"])
            self.situations.add(LogKind(kind).name)
        self.log_read = tail

    def entries(self, *kinds: LogKind) -> list[Any]:
        """Log entries of these kinds, oldest first (the log has not wrapped)."""
        tail = int(self.state["header"]["log_tail"][0])
        assert tail <= self.config.log_entries
        return [e for e in self.log[:tail] if int(e["kind"]) in kinds]


def order_of_acceptance(entries: Iterable[Any]) -> list[tuple[int, int]]:
    """(ring, SQ index) of ACCEPT entries."""
    return [(int(e["ring"]), int(e["c"])) for e in entries]
