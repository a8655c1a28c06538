"""A whole engine in one process whose scheduler moves when told: model, shipped runtime, scheduler, ring client.

Time is counted, not measured, so a run is a function of its requests. For `hil_rigs.parts`: the suite drives it from
another process and gets plain data back. Nothing here judges.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.capture import record_dtype
from blink_core.abi.dtypes import EVENT, Array
from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import Handle, RingClient, RingFull
from blink_core.runtime.cpu import CpuRuntime, Plan
from blink_core.runtime.engine_main import parse_arguments, serve_model, serve_noop
from blink_core.transport.interface import Data
from blink_core.transport.shm import Segment, ShmTransport

TICK_US = 1000
Asked = tuple[Sequence[int], SamplingParams, int, int | None]  # prompt, params, after, cancel_after


@dataclass(slots=True)
class Ran:
    """One request of a run. k, v: float32 [layers, positions, kv_heads, head_dim], as they lay in the pages after the
    step of its last token; None unless its last token was the one at `max_tokens`. logits: float32 [tokens, vocab]."""

    handle: Handle
    tokens: list[int] = field(default_factory=list)
    logits: Array | None = None
    k: Array | None = None
    v: Array | None = None
    known: Array | None = None  # int32: token pool of the positions in k and v


class WatchedTransport(ShmTransport):
    """Shared memory that notes every write and read as (kind, offset, bytes), and calls `on_write` after each write."""

    def __init__(self, segment: Segment, base: int, nbytes: int, on_write: Callable[[], None] = lambda: None) -> None:
        super().__init__(segment, base, nbytes)
        self.posted: list[tuple[str, int, int]] = []
        self.on_write = on_write

    def post_write(self, offset: int, data: Data) -> int:
        self.posted.append(("write", offset, len(memoryview(data).cast("B"))))
        work = super().post_write(offset, data)
        self.on_write()
        return work

    def post_read(self, offset: int, nbytes: int) -> int:
        self.posted.append(("read", offset, nbytes))
        return super().post_read(offset, nbytes)


class SteppedEngine:
    """An engine over `model` (None: the no-op model) and a client attached to its only ring."""

    def __init__(
        self,
        model: str | None,
        folder: str,
        sizes: dict[str, int],
        *,
        batch_invariant: bool = False,
        poll_between_writes: bool = False,
        failing_step: int = -1,
    ) -> None:
        """sizes: fields of EngineConfig. poll_between_writes: the scheduler looks at its queues after every write of
        the client. failing_step: number of the model step, from 0, that raises. Raises what the engine raises when it
        cannot start."""
        command = ["--run-dir", folder, "--segment", "unused", *(["--model", model] if model else [])]
        for name, value in sizes.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        command += ["--batch-invariant"] * batch_invariant + ["--capture"] * (model is not None)
        args = parse_arguments(command)
        self.config, self._served = serve_model(args) if model else serve_noop(args)
        self._capture, self._read = Path(folder) / "capture.bin", 0
        self._runtime = CpuRuntime(self.config, f"blink-stepped-{os.getpid()}-{secrets.token_hex(4)}")
        self._now, self._launched, self._failing = 1, 0, failing_step
        self._last: dict[tuple[int, int], Ran] = {}
        self._wanted: dict[tuple[int, int], int] = {}
        layouts = self.config.layouts()
        base, nbytes = layouts["Control"].nbytes, layouts["Ring"].nbytes
        between = self._poll if poll_between_writes else lambda: None
        self.transport = WatchedTransport(Segment(self._runtime.segment.name), base, nbytes, between)
        self.client = RingClient(self.transport, self.config)
        self.ring = layouts["Ring"].views(self._runtime.segment.buffer, base)
        self._plan = layouts["Plan"].views(self._runtime.plan.buffer)
        state = layouts["State"].views(self._runtime.state.buffer)
        self._tokens = state["tokens"].reshape(-1, self.config.max_len)
        self.attach(self.client)

    def attach(self, client: RingClient, timeout: float = 20.0) -> int:
        """Attaches a client while the scheduler moves; its epoch."""
        got: list[int | Exception] = []

        def attach() -> None:
            try:
                got.append(client.attach(timeout))
            except Exception as error:  # told on the calling thread
                got.append(error)

        thread = threading.Thread(target=attach, daemon=True)
        thread.start()
        while thread.is_alive():
            self.tick()
            thread.join(0.0005)
        if isinstance(got[0], Exception):
            raise got[0]
        return got[0]

    def _poll(self) -> None:
        self._now += 1
        self._runtime.scheduler.poll(self._now)

    def tick(self) -> bool:
        """One boundary, its model step if it planned one, and a poll; whether there was a step."""
        self._now += TICK_US
        launched = bool(self._runtime.scheduler.boundary(self._now))
        if launched:
            plan = self._runtime.current_plan()
            # What CpuRuntime.serve does with a plan: the same call, its status where `complete` would put it.
            self._plan["header"]["status"] = int(self._runtime._run(self._step))
            self._look(plan)
        self._poll()
        return launched

    def _step(self, plan: Plan) -> None:
        self._launched += 1
        if self._launched == self._failing + 1:
            raise RuntimeError("the model step fails, as it was asked to")
        self._served.step(plan)

    def _look(self, plan: Plan) -> None:
        """Keeps the KV rows of requests that this step ends, while their pages are still theirs."""
        kv = self._served.kv
        if kv is None or self._served.info.kv_shape is None:
            return
        shape = self._served.info.kv_shape
        pool = kv.array(np.float32, shape)
        for row in plan.rows.tolist():
            named = dict(zip(plan.rows.dtype.names or (), row, strict=True))
            key = int(named["slot"]), int(named["generation"])
            if key not in self._wanted or not named["sample"] or named["emitted"] + 1 != self._wanted[key]:
                continue
            count = int(named["context_len"])
            # Not from the plan's own table, which a fault may have changed: from the scheduler's, as it lies.
            used = self._table(named["row"])[: -(-count // self.config.page_size)]
            both = pool[:, :, used].reshape(2, shape[1], -1, *shape[4:])[:, :, :count]
            ran = self._last[key]
            ran.k, ran.v = both[0].copy(), both[1].copy()
            ran.known = self._tokens[named["request"], :count].copy()

    def _table(self, row: int) -> Array:
        layout = self.config.layouts()["State"].views(self._runtime.state.buffer)
        table: Array = layout["block_tables"].reshape(self.config.max_rows, self.config.max_pages)[row].astype(np.int64)
        return table

    def run(self, asked: Sequence[Asked], limit: int = 4000) -> dict[str, Any]:
        """Runs requests to their end. after: submitted once so many TOKEN and terminal events were seen in all, or once
        nothing is open; cancel_after: cancelled at so many of its tokens.

        Returns requests (`Ran` as dicts, None for one that was never submitted), events (uint8 of `Event` records, in
        the order of delivery), cancelled (indices), calls (as in History), steps, torn (entries that the engine had to
        read again) and done (every request had its terminal event within `limit` ticks).
        """
        waiting = list(range(len(asked)))
        ran: list[Ran | None] = [None] * len(asked)
        by_key: dict[tuple[int, int], int] = {}
        seen, open_, cancelled = [0] * len(asked), set[int](), set[int]()
        counted = steps = 0
        calls: list[tuple[str, int]] = []
        batches: list[Array] = []
        torn, extra = self._runtime.status("torn"), 2
        self._last, self._wanted = {}, {}
        for _ in range(limit):
            for index in sorted(open_ - cancelled):
                after = asked[index][3]
                if after is not None and seen[index] >= after:
                    self.client.cancel(ran[index].handle)  # type: ignore[union-attr]
                    cancelled.add(index)
                    calls.append(("cancel", index))
            while waiting and (counted >= asked[waiting[0]][2] or not open_):
                index = waiting[0]
                try:
                    handle = self.client.submit(asked[index][0], asked[index][1], tag=index)
                except RingFull:
                    break
                waiting.pop(0)
                key = handle.slot, handle.generation
                calls.append(("submit", index))
                ran[index], by_key[key] = Ran(handle), index
                self._last[key], self._wanted[key] = ran[index], asked[index][1].max_tokens  # type: ignore[assignment]
                open_.add(index)
            steps += self.tick()
            events = self.client.poll(0.0)
            batches.append(events)
            calls.append(("poll", len(events)))
            for event in events:
                found = by_key.get((int(event["slot"]), int(event["generation"])))
                if event["kind"] == EventKind.TOKEN:
                    counted += 1
                    if found is not None:
                        seen[found] += 1
                        ran[found].tokens.append(int(event["token"]))  # type: ignore[union-attr]
                elif event["kind"] >= EventKind.FINISH:
                    counted += 1
                    open_.discard(-1 if found is None else found)
            if not waiting and not open_:
                extra -= 1  # an event after the last terminal one would be a fault: look again
                if extra == 0:
                    break
        self._logits(ran, asked)
        every = np.concatenate([np.zeros(0, EVENT), *batches])
        return {
            "requests": [None if r is None else _plain(r) for r in ran],
            "events": every.tobytes(),
            "cancelled": sorted(cancelled),
            "calls": calls,
            "steps": steps,
            "torn": self._runtime.status("torn") - torn,
            "done": not waiting and not open_,
        }

    def _logits(self, ran: Sequence[Ran | None], asked: Sequence[Asked]) -> None:
        """Rows of the engine's own capture that belong to the tokens delivered."""
        if not self._capture.exists():
            return
        dtype = record_dtype(self.config.vocab)
        with self._capture.open("rb") as file:
            file.seek(self._read)
            raw = file.read()
        self._read += len(raw)
        records = np.frombuffer(raw, dtype, len(raw) // dtype.itemsize)
        rows = {(int(r["slot"]), int(r["generation"]), int(r["position"])): r["logits"] for r in records}
        for one, (prompt, *_) in zip(ran, asked, strict=True):
            if one is None:
                continue
            at = [(one.handle.slot, one.handle.generation, len(prompt) + i) for i in range(len(one.tokens))]
            if at and all(key in rows for key in at):
                one.logits = np.stack([rows[key] for key in at])

    def written(self) -> list[tuple[str, int, int]]:
        """What the client has posted since the last call: (kind, offset, bytes)."""
        posted, self.transport.posted = self.transport.posted, []
        return posted

    def close(self) -> None:
        self._runtime.close()


def _plain(ran: Ran) -> dict[str, Any]:
    h = ran.handle
    return {
        "slot": h.slot,
        "generation": h.generation,
        "sq_index": h.sq_index,
        "tokens": ran.tokens,
        "logits": ran.logits,
        "k": ran.k,
        "v": ran.v,
        "known": ran.known,
    }
