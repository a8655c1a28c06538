"""Who drives the step graphs: the host's scheduler thread, or the resident scheduler on the GPU [design 6].

Both run the same scheduler source over the same regions, and launch the same graphs. `HostDriven` is what everybody
does, kept as the control and for tools that serialise kernels (compute-sanitizer, profilers). `DeviceDriven` needs the
host for nothing once `serve` has launched it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
from cuda.bindings import driver

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import STATUS_LINE
from blink_core.abi.enums import EngineState, StepStatus
from blink_core.ops.cuda_capture import captured
from blink_core.ops.cuda_modules import Kernel, check, pointer
from blink_core.ops.cuda_sources import source
from blink_core.runtime.cpu import CpuRuntime, ModelStep, noop_step
from blink_core.runtime.cuda_graphs import address_table, instantiate
from blink_core.runtime.cuda_memory import Pinned, device_view
from blink_core.runtime.cuda_model import CudaNetwork
from blink_core.runtime.cuda_step import CudaStep, StepMemory, poison
from blink_core.runtime.descriptor import SanitizerInfo
from blink_core.runtime.launch_build import Built, LaunchOptions, kv_shape, mirrored_bytes
from blink_core.runtime.memory import OwnedMemory
from blink_core.runtime.nvrtc import DEVICE, serve_options
from blink_core.runtime.redo import redo_parts
from blink_core.runtime.serve_abi import (
    BUCKET,
    FAILURE_TEXT,
    MAX_BUCKETS,
    MIRROR,
    NEXT_ROW_BYTES,
    PHASES,
    REPORT,
    SAMPLE,
    SERVE_BYTES,
    SERVE_DONE,
    STEADY_ROWS,
    Failure,
    ServeParams,
)
from blink_core.runtime.switch_graph import SwitchGraph, make_switch
from blink_core.transport.shm import Segment

__all__ = ["DeviceDriven", "EngineLost", "HostDriven", "LaunchOptions", "Runtime", "kv_shape", "make_runtime"]

log = logging.getLogger("blink.cuda")

STRATEGIES = ("host", "fire", "tail", "switch", "auto")
LOOK_S = 0.2  # between two looks of the process that waits for the engine's end
MIRROR_KIND = {"float32": 0, "bfloat16": 1, "float16": 2}
THREADS = 256


class EngineLost(RuntimeError):
    """The scheduler's graph ended without having stopped, or the GPU reports an error: nothing runs any more."""


class HostDriven(CpuRuntime):
    """The host's scheduler thread; state and plan in pinned memory, where the step reads and writes them."""

    def __init__(self, config: EngineConfig, segment: str, network: CudaNetwork | None, options: LaunchOptions) -> None:
        super().__init__(config, segment)
        self._pinned = [Pinned(self.state), Pinned(self.plan)]
        self.kv: OwnedMemory | None = None
        pool: cp.ndarray | None = None
        nbytes = mirrored_bytes(network, config, options)
        if nbytes and network is not None and network.ops.dtype == "float32":
            # The scheduler's thread holds by itself, without a word to us: the pages lie where verification reads them.
            self.kv = OwnedMemory("kv", nbytes)
            self._pinned.append(Pinned(self.kv))
            pool = device_view(self.kv.address, kv_shape(network, config), cp.float32)
            poison(pool, "float32")
        done = cp.zeros(1, cp.uint64)
        self._done = done
        memory = StepMemory(self.state.address, self.plan.address, int(done.data.ptr))
        self._built = Built(network, config, memory, options, pool)
        self.report = self._built.report

    def serve(self, step: ModelStep = noop_step) -> None:
        """As CpuRuntime's, with the graphs as the model step."""
        super().serve(step)

    def _run(self, step: ModelStep) -> StepStatus:
        header = self._plan_views["header"][0]
        sizes = (int(header["n_tokens"]), int(header["n_rows"]), int(header["n_samples"]))
        try:
            self._redo(int(header["n_rows"]))
            self._built.graphs.launch(self._built.graphs.choose(*sizes))
        except Exception:
            log.exception("model step failed")
            return StepStatus.FAILED
        return StepStatus(int(header["status"]))

    def _redo(self, n_rows: int) -> None:
        """The passes that LongRoPE asks for ahead of the plan."""
        graphs, step, longest = self._built.graphs, self._built.step, self._built.original_max
        parts = redo_parts(self._plan_views["rows"][:n_rows], longest, self.config.token_budget)
        if not parts or not isinstance(step, CudaStep):
            return
        for part in parts:
            step.set_redo(part)
            graphs.launch(graphs.choose(part[2], 1, 0))
        step.set_redo((0, 0, 0))

    @property
    def sanitizer_info(self) -> SanitizerInfo | None:
        """Where others find the KV sanitizer's reports and counters."""
        return self._built.sanitizer_info

    def close(self) -> None:
        super().close()
        self._built.close()
        for pinned in self._pinned:
            pinned.close()


class DeviceDriven:
    """The resident scheduler: rings and log in pinned memory, state and plan in device memory.

    `state` and `kv` are copies for verification, made by the scheduler whenever it is held; `log` is the log itself.
    """

    def __init__(self, config: EngineConfig, segment: str, network: CudaNetwork | None, options: LaunchOptions) -> None:
        """Builds everything but starts nothing. Raises TransportError, CudaError or cupy's errors."""
        begin = time.monotonic()
        self.config, self.options, self._network = config, options, network
        self.layouts = config.layouts()
        self.segment = Segment(segment, config.shared_nbytes())
        self._pinned: list[Pinned] = []
        self._built: Built | None = None
        self._switch: SwitchGraph | None = None
        self._lost = False
        self.report: dict[str, Any] = {}
        try:
            self._allocate()
            self._build()
        except BaseException:
            self.close()
            raise
        self.report |= {"build_seconds": round(time.monotonic() - begin, 3)}

    # -- building ------------------------------------------------------------------------------------------------------

    def _pin(self, memory: OwnedMemory | Segment) -> int:
        self._pinned.append(Pinned(memory))
        return self._pinned[-1].device

    def _allocate(self) -> None:
        config, layouts = self.config, self.layouts
        self.segment.buffer[: config.pack().nbytes] = config.pack().tobytes()
        self.log = OwnedMemory("log", layouts["Log"].nbytes)
        self.state = OwnedMemory("state", layouts["State"].nbytes)
        self._report = OwnedMemory("report", REPORT.itemsize)
        slots = self.options.time_slots
        self._samples = OwnedMemory("samples", slots * (SAMPLE.itemsize + 16 + 8 * len(PHASES) * self.options.phases))
        for memory in (self.segment, self.log, self.state, self._report, self._samples):
            self._pin(memory)
        self.device_state = cp.zeros(layouts["State"].nbytes, cp.uint8)
        self.device_plan = cp.zeros(layouts["Plan"].nbytes, cp.uint8)
        self._serve = cp.zeros(SERVE_BYTES, cp.uint8)
        self.kv: OwnedMemory | None = None
        if nbytes := mirrored_bytes(self._network, config, self.options):
            self.kv = OwnedMemory("kv", nbytes)
            self.kv.array(np.float32, (nbytes // 4,)).fill(np.nan)
            self._pin(self.kv)
        control = layouts["Control"].sections
        self._control = self.segment.address + control["control"].offset
        self._status = self.segment.address + control["status"].offset

    def _build(self) -> None:
        slots = self.options.time_slots
        memory = StepMemory(
            state=int(self.device_state.data.ptr),
            plan=int(self.device_plan.data.ptr),
            done=int(self._serve.data.ptr) + SERVE_DONE,
            times=self._samples.address + slots * SAMPLE.itemsize,
            time_slots=slots,
        )
        switch = self.options.strategy == "switch"
        flags = serve_options(switch=switch, phases=self.options.phases)
        module = cp.RawModule(code=source("serve_kernel.cu", DEVICE), backend="nvrtc", options=flags)
        function = module.get_function("blink_serve")
        # A multiprocessor's split of L1 and shared memory cannot change beside a resident block: with all of it shared,
        # the step's kernels find a place there as on every other one.
        function.preferred_shared_memory_carveout = 100
        self._kernel = Kernel("blink_serve", function, NEXT_ROW_BYTES * min(self.config.max_rows, STEADY_ROWS))
        init = Kernel("blink_serve_init", module.get_function("blink_serve_init"))
        self._built = Built(self._network, self.config, memory, self.options)
        self.report = self._built.report
        stream = self.stream = self._built.graphs.stream
        with stream:
            init.launch(
                1, 32, *(_address(a) for a in (self.segment.address, self.device_state, self.log.address)),
                _address(self.device_plan), _address(self._serve), dependent=False,
            )  # fmt: skip
        stream.synchronize()
        params = self._params()
        cp.cuda.Device().synchronize()
        self._executable = self._switched(params) if switch else self._launched(params)
        self.state.buffer[: self.device_state.nbytes] = cp.asnumpy(self.device_state).tobytes()

    def _launch(self, params: ServeParams) -> None:
        self._kernel.launch(1, THREADS, params, dependent=False)

    def _launched(self, params: ServeParams) -> Any:
        """The scheduler's own graph, which launches the steps' from the device."""
        self._graph = captured(self.stream, lambda: self._launch(params))
        return instantiate(self._graph, self.stream, device=True)

    def _switched(self, params: ServeParams) -> Any:
        """One graph that holds the scheduler and all steps."""
        assert self._built is not None
        graphs = self._built.graphs

        def scheduler(branch: int, loop: int) -> None:
            params.branch, params.loop = branch, loop
            self._launch(params)

        kernels = None if self._network is None else self._network.ops.kernels
        self._switch = make_switch(self.stream, scheduler, [graphs.work(g) for g in graphs.graphs], kernels)
        dependent = kernels is not None and kernels.dependent
        self.report |= {"executables": 1, "graph_nodes": self._switch.nodes, "dependent_launch": dependent}
        return self._switch.executable

    def _params(self) -> ServeParams:
        assert self._built is not None
        graphs = self._built.graphs.graphs
        if len(graphs) > MAX_BUCKETS:
            raise ValueError(f"{len(graphs)} buckets, at most {MAX_BUCKETS}")
        table = np.zeros(len(graphs), BUCKET)
        first = 0
        for i, g in enumerate(graphs):
            b = g.bucket
            table[i] = (b.tokens, b.rows, b.samples, b.decode, g.tail, first, len(g.executables), 0)
            first += len(g.executables)
        mirrors = self._mirrors()
        self._tables = (cp.asarray(table.view(np.uint8)), address_table(graphs), cp.asarray(mirrors.view(np.uint8)))
        header = self.state.address + self.layouts["State"].sections["header"].offset
        params = ServeParams(
            self.segment.address, int(self.device_state.data.ptr), self.log.address, int(self.device_plan.data.ptr),
            int(self._serve.data.ptr), self._report.address, *(int(t.data.ptr) for t in self._tables), header,
            self._samples.address, pointer(getattr(self._built.step, "redo", None)), self._phases, len(graphs),
            len(mirrors) if self.options.mirror else 0, self.options.time_slots, self._built.original_max,
            int(self.options.step_limit_s * 1e9), int(self.options.run_limit_s * 1e9),
        )  # fmt: skip
        params.watched = int(self._built.reporter is not None)
        return params

    def _mirrors(self) -> Any:
        assert self._built is not None
        kv = self._built.kv
        mirrors = [(int(self.device_state.data.ptr), self.state.address, self.device_state.nbytes, 0)]
        if self.kv is not None and self._network is not None:
            mirrors.append((int(kv.data.ptr), self.kv.address, int(kv.nbytes), MIRROR_KIND[self._network.ops.dtype]))
        return np.array(mirrors, MIRROR)

    # -- running -------------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Live requests end with ERROR DRAINING; `serve` returns."""
        _native.store_release(self._control, 1)

    def request_drain(self) -> None:
        """New requests are refused, live ones finish."""
        _native.store_release(self._control + 8, 1)

    def status(self, field: str) -> int:
        """A word of the status line, e.g. 'state'."""
        return _native.load_acquire(self._status + STATUS_LINE.offsets()[field])

    def start(self) -> None:
        """Launches the scheduler's graph. From here on the host is needed for nothing."""
        check(driver.cuGraphLaunch(self._executable, driver.CUstream(self.stream.ptr)), "cuGraphLaunch")

    def ended(self) -> bool:
        """Whether the engine has stopped. Raises EngineLost if it ended without that, or the GPU reports an error."""
        if _native.load_acquire(self._report.address) != 0:
            return True
        (error,) = driver.cuStreamQuery(driver.CUstream(self.stream.ptr))
        if error == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if _native.load_acquire(self._report.address) != 0:
            return True
        self._declare_lost()
        raise EngineLost(f"the scheduler's graph has ended and the engine was not stopped: {error.name}")

    def _over(self, seconds: float) -> bool:
        """Whether the scheduler's graph has ended, or ends within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            (error,) = driver.cuStreamQuery(driver.CUstream(self.stream.ptr))
            if error != driver.CUresult.CUDA_ERROR_NOT_READY:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)

    def _declare_lost(self) -> None:
        """Nobody on the GPU can say it any more: the rings' state lines get FAILED from here, and keep it."""
        self._lost = True
        layout = self.layouts["Ring"]
        for ring in range(self.config.rings):
            base = self.segment.address + self.layouts["Control"].nbytes + ring * layout.nbytes
            _native.store_release(base + layout.sections["gpu"].offset + 32, int(EngineState.FAILED))
        _native.store_release(self._status, int(EngineState.FAILED))

    @property
    def sanitizer_info(self) -> SanitizerInfo | None:
        """Where others find the KV sanitizer's reports and counters."""
        return self._built.sanitizer_info if self._built is not None else None

    def failure(self) -> str | None:
        """Why the engine failed, None if it did not."""
        report = np.frombuffer(self._report.buffer, REPORT, 1)[0]
        code = int(report["failure"])
        if code == Failure.NONE:
            return None
        text = FAILURE_TEXT[Failure(code)]
        return text.format(detail=int(report["failure_detail"]), step=int(report["failure_step"]))

    def serve(
        self, on_failure: Callable[[str], None] = lambda why: None, lost: Callable[[], str | None] = lambda: None
    ) -> None:
        """Starts the engine and sleeps until it has stopped. lost: asked all the time; a reason ends the engine.

        Raises EngineLost.
        """
        self.start()
        told = False
        while not self.ended():
            if (reason := lost()) is not None:
                self._declare_lost()
                raise EngineLost(reason)
            if not told and (why := self.failure()) is not None:
                log.error("engine failed: %s", why)
                on_failure(why)
                told = True
            time.sleep(LOOK_S)
        self.stream.synchronize()
        report = np.frombuffer(self._report.buffer, REPORT, 1)[0]
        counted = {name: int(report[name]) for name in ("executions", "launches", "refused", "steady")}
        log.info("device launches: %s", json.dumps(counted))

    def times(self) -> tuple[Any, Any]:
        """Boundaries as SAMPLE records and (begun, ended) of the step graphs, uint64 [slots, 2]; ns, by step number."""
        slots = self.options.time_slots
        samples = np.frombuffer(self._samples.buffer, SAMPLE, slots)
        times = np.frombuffer(self._samples.buffer, np.uint64, 2 * slots, slots * SAMPLE.itemsize).reshape(slots, 2)
        return samples, times

    @property
    def _phases(self) -> int:
        slots = self.options.time_slots
        return self._samples.address + slots * (SAMPLE.itemsize + 16) if self.options.phases else 0

    def phases(self) -> Any:
        """With LaunchOptions.phases: when each of `serve_abi.PHASES` was over, uint64 [slots, phases]; ns, by number of
        the step that the boundary launched. A boundary that is not steady leaves those between as they were."""
        if not self.options.phases:
            raise ValueError("LaunchOptions.phases was not set")
        slots = self.options.time_slots
        offset = self._phases - self._samples.address
        return np.frombuffer(self._samples.buffer, np.uint64, slots * len(PHASES), offset).reshape(slots, len(PHASES))

    def close(self) -> None:
        """Stops the engine, waits for its end for a while, and unlinks the shared memory.

        A lost engine is not asked to stop: a scheduler that does run on would answer for it, with a state of STOPPED
        and requests that ended with DRAINING. Nor is anything asked of CUDA, which after an error answers every call
        with it. All that ends with the process.
        """
        if hasattr(self, "_executable") and hasattr(self, "_control"):
            if not self._lost:
                self.request_stop()
            if self._lost or not self._over(5.0):
                log.error("the scheduler has not ended in order; its memory stays registered until the process ends")
                self.segment.close()
                return
        if self._switch is not None:
            self._switch.close()
        if self._built is not None:
            self._built.close()
        self.segment.close()
        for pinned in self._pinned:
            pinned.close()


def _address(value: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(value if isinstance(value, int) else int(value.data.ptr))


Runtime = HostDriven | DeviceDriven


def make_runtime(config: EngineConfig, segment: str, network: CudaNetwork | None, options: LaunchOptions) -> Runtime:
    """The runtime of a strategy. Raises ValueError for an unknown one."""
    if options.strategy == "host":
        return HostDriven(config, segment, network, options)
    if options.strategy in STRATEGIES:
        return DeviceDriven(config, segment, network, options)
    raise ValueError(f"launch strategy {options.strategy!r}: there are {', '.join(STRATEGIES)}")
