"""Host runtime: engine memory, the native scheduler thread, and the model step as its callback."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import STRUCTS
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import StepStatus
from blink_core.runtime.memory import OwnedMemory
from blink_core.transport.shm import Segment

log = logging.getLogger("blink.runtime")

_CONTROL = next(s for s in STRUCTS if s.name == "ControlLine").offsets()
_STATUS = next(s for s in STRUCTS if s.name == "StatusLine").offsets()


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, as zero-copy views; valid until the callback returns.

    rows: PlanRow[R]. token_ids, positions: int32[T]. kv_slots: int64[T]. block_tables: uint32[R, P] page ids, P the
    longest table of the step. results: StepResult[R], to be filled for rows with `sample` set. sampling: Sampling[R].
    bias: BiasPair[R, max_bias], the first n_bias of a row count. tokens: R views int32[max_len], of a sampled row the
    first context_len are its prompt and output. masks: uint32[R, mask_words], counts for rows with `masked` set.
    eos_ids: int32[E]. top_tokens, top_logprobs: int32 and float32 [R, max_logprobs], to be filled for the alternatives
    asked for.

    A row whose request was cancelled meanwhile may show its successor's sampling, bias and tokens, checked or not; what
    it gives is dropped.
    """

    step: int
    rows: Array
    token_ids: Array
    positions: Array
    kv_slots: Array
    block_tables: Array
    results: Array
    sampling: Array
    bias: Array
    tokens: list[Array]
    masks: Array
    eos_ids: Array
    top_tokens: Array
    top_logprobs: Array


HOLD_LIMIT_S = 30.0  # of the scheduler's loop (native/loop.hpp): then it goes on by itself
ModelStep = Callable[[Plan], None]


class CpuRuntime:
    """Owns an engine's memory and scheduler thread. `serve` runs the model step on the calling thread."""

    def __init__(self, config: EngineConfig, segment_name: str) -> None:
        """Creates shared memory `segment_name` and starts from zeroed state. Raises TransportError if it cannot."""
        self.config = config
        self.layouts = config.layouts()
        self.segment = Segment(segment_name, config.shared_nbytes())
        try:
            self._allocate()
        except BaseException:
            self.segment.close()
            raise

    def _allocate(self) -> None:
        """Engine-owned memory and the scheduler over it."""
        config = self.config
        self.segment.buffer[: config.pack().nbytes] = config.pack().tobytes()
        self.state = OwnedMemory("state", self.layouts["State"].nbytes)
        self.log = OwnedMemory("log", self.layouts["Log"].nbytes)
        self.plan = OwnedMemory("plan", self.layouts["Plan"].nbytes)
        self.scheduler = _native.Scheduler(
            self.segment.address, self.state.address, self.log.address, self.plan.address
        )
        self.scheduler.init()
        self._plan_views = self.layouts["Plan"].views(self.plan.buffer)
        state, requests = self.layouts["State"].views(self.state.buffer), config.rings * config.slots
        self._header = state["header"]
        self._tables = state["block_tables"].reshape(config.max_rows, config.max_pages)
        self._sampling = state["sampling"]
        self._bias = state["bias"].reshape(requests, config.max_bias)
        self._tokens = state["tokens"].reshape(requests, config.max_len)
        self._masks = state["masks"].reshape(config.max_rows, config.mask_words)
        self._eos_ids = np.asarray(config.eos_ids, np.int32)
        self._control = self.segment.address + self.layouts["Control"].sections["control"].offset
        self._status = self.segment.address + self.layouts["Control"].sections["status"].offset

    def request_stop(self) -> None:
        """Live requests end with ERROR DRAINING; `serve` returns."""
        _native.store_release(self._control, 1)

    def request_drain(self) -> None:
        """New requests are refused, live ones finish."""
        _native.store_release(self._control + 8, 1)

    def status(self, field: str) -> int:
        """A word of the status line, e.g. 'state'."""
        return _native.load_acquire(self._status + _STATUS[field])

    @property
    def step_in_flight(self) -> bool:
        """Whether a plan has been given out and its results not taken yet."""
        return bool(self._header["in_flight"][0])

    @property
    def hold(self) -> int:
        """Ticket of the hold that the scheduler has granted and nobody has released yet, 0 without one. Still there
        when the scheduler went on by itself after HOLD_LIMIT_S."""
        ticket = self.status("pause_ack")
        return ticket if ticket > _native.load_acquire(self._control + _CONTROL["pause_release"]) else 0

    @property
    def step_given_up(self) -> bool:
        """For the step that runs: whether the engine stops and no longer waits for it. The boundary that says so then
        ends its requests and frees their pages, and no other plan follows."""
        return _native.load_acquire(self._control) != 0 and not int(self._header["in_flight"][0])

    def current_plan(self) -> Plan:
        """Views of the plan that waits."""
        header = self._plan_views["header"][0]
        n_rows, n_tokens = int(header["n_rows"]), int(header["n_tokens"])
        rows = self._plan_views["rows"][:n_rows]
        width, requests = int(rows["n_pages"].max()), rows["request"]
        top = self.config.max_logprobs
        return Plan(
            step=int(header["step"]),
            rows=rows,
            token_ids=self._plan_views["token_ids"][:n_tokens],
            positions=self._plan_views["positions"][:n_tokens],
            kv_slots=self._plan_views["kv_slots"][:n_tokens],
            block_tables=self._tables[rows["row"], :width],
            results=self._plan_views["results"][:n_rows],
            sampling=self._sampling[requests],
            bias=self._bias[requests],
            tokens=[self._tokens[request] for request in requests],
            masks=self._masks[rows["row"]],
            eos_ids=self._eos_ids,
            top_tokens=self._plan_views["top_tokens"][: n_rows * top].reshape(n_rows, top),
            top_logprobs=self._plan_views["top_logprobs"][: n_rows * top].reshape(n_rows, top),
        )

    def serve(self, step: ModelStep) -> None:
        """Starts the scheduler thread and runs `step` for every plan until the engine stops.

        A step that raises ends its requests with ERROR MODEL_ERROR and is logged; the engine goes on.
        """
        self.scheduler.start()
        try:
            while True:
                waiting = self.scheduler.wait_plan(200)
                if waiting < 0:
                    return
                if waiting == 0:
                    continue
                self.scheduler.complete(self._run(step))
        finally:
            self.scheduler.join()

    def _run(self, step: ModelStep) -> StepStatus:
        try:
            step(self.current_plan())
        except Exception:
            log.exception("model step failed")
            return StepStatus.FAILED
        return StepStatus.OK

    def close(self) -> None:
        """Stops the scheduler and unlinks the shared memory."""
        self.scheduler.join()
        self.segment.close()


def noop_step(plan: Plan) -> None:
    """A model that costs nothing: a fixed function of request and context length. For benchmarks and protocol tests."""
    results: Any = plan.results
    results["token"] = (plan.rows["request"] * 31 + plan.rows["context_len"] * 7) % 251
    results["logprob"] = 0.0
    results["status"] = StepStatus.OK
    rank = np.arange(plan.top_tokens.shape[1], dtype=np.int32)
    plan.top_tokens[:] = (results["token"][:, None] + rank) % 251  # the token itself, and its neighbours behind it
    plan.top_logprobs[:] = -rank


def poison(pool: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Fills a KV pool with NaN, so that reading a row nobody wrote shows at once (design section 5)."""
    pool.fill(np.nan)
