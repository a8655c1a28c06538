"""The `local` rig: an engine process and a front-end process on this machine, and handles to both."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blink_core.abi.enums import Admission
from blink_core.frontend.engine_client import HEARTBEAT_LIMIT_S, open_ring
from blink_core.frontend.ring_client import RingClient
from blink_core.runtime.descriptor import EngineDescriptor
from blink_core.transport.shm import SHM_DIR, remove_dead_segments
from hil_rigs.description import RigDescription
from hil_rigs.engine_memory import EngineMemory, EngineUnreachable
from hil_rigs.kv_reports import KvReports
from hil_rigs.scratch import Scratch

START_TIMEOUT_S = 180.0  # a cold page cache and a busy machine; SmolLM2 takes about 3 s
STOP_TIMEOUT_S = 20.0
ENGINE_MODULE = ("-m", "blink_core.runtime.engine_main")
# What GGUF files carry at the end of their names: .Q4_1, -Q4_K_M, .IQ3_XXS, .f16, -BF16.
_QUANTISATION = re.compile(r"[.-](?:(?:I|T)?Q[1-8](?:_[0-9A-Z]+)*|B?F16|F32|MXFP4)$", re.IGNORECASE)


class RigFailure(RuntimeError):
    """A process of the rig did not start, or died; the message ends with the last lines of its log."""


class StartCancelled(RigFailure):
    """The start was broken off because the caller asked for it."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How one engine is run, beyond the rig's description."""

    batch_invariant: bool = False
    capture: bool = False
    kv_sanitizer: bool = False  # also on if the description says so
    kv_reports_expected: bool = False  # its plans are made wrong: what its KV sanitizer reports is no failure
    engine_command: tuple[str, ...] = ()  # in place of the description's, if there is any
    verbosity: str = "info"
    heartbeat_limit_s: float = HEARTBEAT_LIMIT_S  # after which the front end takes the engine for lost
    threads: int = 0  # BLAS threads of the engine; 0: half the cores, for BLAS threads spin and starve the others
    engine: dict[str, int] = field(default_factory=dict)  # EngineConfig fields that override the description
    logs: Path | None = None  # folder that keeps the processes' logs; None: they go with the rig's own folder


def served_name(model: Path) -> str:
    """Name of the API for a model: a folder's name, or a GGUF file's without `.gguf` and its quantisation."""
    if not model.is_file() or model.suffix.lower() != ".gguf":
        return model.name
    return _QUANTISATION.sub("", model.stem) or model.stem


class LocalRig:
    """Starts and stops the processes. Ring 0 belongs to the HTTP front end; the others are for `ring`."""

    def __init__(
        self,
        description: RigDescription,
        model: Path | None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        http: bool = True,
        name: str | None = None,
        options: LocalOptions | None = None,
    ) -> None:
        """model: GGUF file or HuggingFace folder; None runs the no-op model, which has no HTTP front end.

        name: unique part of all names this rig takes (shared memory, folder); drawn if None.
        """
        self.description, self.model, self.options = description, model, options or LocalOptions()
        self._host, self._port, self._http = host, port, http and model is not None
        self.name = name or f"{os.getpid()}-{secrets.token_hex(4)}"
        self.run_dir: Path | None = None  # of the processes' files, while the rig runs
        self._scratch: Scratch | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._descriptor: EngineDescriptor | None = None
        self._memory: EngineMemory | None = None
        self._kv: KvReports | None = None
        self.kv_reported = 0  # reports of the KV sanitizer, of all engines that have been stopped
        self.kv_first_report: dict[str, Any] = {}  # the first of them; empty where it could not be read
        self._base_url: str | None = None
        self._drawn_port: int | None = None
        self.on_stop: Callable[[], None] = lambda: None  # called before processes are stopped: their memory goes

    # ---- what a running rig offers

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        if self.model is None:
            return "noop"
        return served_name(self.model)

    @property
    def base_url(self) -> str:
        """e.g. http://127.0.0.1:8000 (without /v1)."""
        if self._base_url is None:
            raise RigFailure("the rig has no running HTTP front end")
        return self._base_url

    @property
    def descriptor(self) -> EngineDescriptor:
        if self._descriptor is None:
            raise RigFailure("the rig is not running")
        return self._descriptor

    @property
    def memory(self) -> EngineMemory:
        """Raw memory of the engine, opened on first use."""
        if self._memory is None:
            self._memory = EngineMemory(self.descriptor)
        return self._memory

    def ring(self, index: int = 1) -> RingClient:
        """A client attached to a ring that no front end uses; earlier clients of the ring are superseded."""
        client = open_ring(self.descriptor, index)
        client.attach()
        return client

    def pid(self, process: str) -> int:
        """Process id of 'engine' or 'frontend'."""
        return self._running(process).pid

    def _running(self, process: str) -> subprocess.Popen[bytes]:
        if process not in self._processes:
            there = ", ".join(self._processes) or "none"
            raise RigFailure(f"the rig has no process {process!r}; it has: {there}")
        return self._processes[process]

    def send(self, process: str, number: signal.Signals) -> None:
        """Sends a signal to 'engine' or 'frontend'. Raises RigFailure when it is not there or has ended."""
        running = self._running(process)
        if running.poll() is not None:
            raise RigFailure(f"{process} has exited with status {running.returncode}")
        running.send_signal(number)

    def exited(self, process: str) -> str | None:
        """How a process has ended, with the end of its log; None while it runs."""
        code = self._running(process).poll()
        return None if code is None else f"{process} exited with status {code}\n{self.log_tail(process)}"

    def restart(
        self,
        process: str = "frontend",
        timeout: float = START_TIMEOUT_S,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts the front end again, killing it first if it still runs, on its old port; it attaches anew.

        process: only 'frontend': an engine that is gone takes its memory with it, so `stop` and `start` the rig.
        Raises RigFailure when there was none, or it is not ready in `timeout` seconds, StartCancelled as `start` does.
        """
        if process != "frontend":
            raise RigFailure(f"{process} is not restarted alone; stop and start the rig")
        assert self.run_dir is not None
        self._end(self._running("frontend"), signal.SIGKILL)
        ready = self.run_dir / "frontend.json"
        ready.unlink(missing_ok=True)
        self._spawn("frontend", self._frontend_command())
        self._await("frontend", ready, time.monotonic() + timeout, cancelled)

    # ---- life cycle

    def start(self, timeout: float = START_TIMEOUT_S, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Starts the engine and then the front end. Raises RigFailure; whatever had started is stopped again.

        `cancelled` is asked all the time; True breaks the start off with StartCancelled.
        """
        remove_dead_segments()  # of engines that were killed: they hold memory that this one may need
        self._scratch = Scratch(self.name)
        folder = self.run_dir = self._scratch.path
        try:
            deadline = time.monotonic() + timeout
            self._spawn("engine", self._engine_command())
            self._await("engine", folder / "engine.json", deadline, cancelled)
            self._descriptor = EngineDescriptor.read(folder / "engine.json")
            self._kv = self._kv_reports(self._descriptor)
            if self._http:
                self._spawn("frontend", self._frontend_command())
                self._await("frontend", folder / "frontend.json", deadline, cancelled)
                ready = json.loads((folder / "frontend.json").read_text())
                self._base_url, self._drawn_port = ready["url"], int(ready["port"])
        except BaseException:
            self.stop()
            raise

    @staticmethod
    def _kv_reports(descriptor: EngineDescriptor) -> KvReports | None:
        """Opened at the start: the counters of an engine that has died can be read, but not opened."""
        if descriptor.kv_sanitizer is None:
            return None
        try:
            return KvReports(descriptor)
        except EngineUnreachable as error:
            raise RigFailure(str(error)) from error

    def _engine_command(self) -> list[str]:
        assert self.run_dir is not None
        engine, options = self.description.engine, self.options
        sizes = {
            "rings": engine.rings,
            "slots": engine.slots,
            "page_size": engine.page_size,
            "pages": engine.pages,
            "max_rows": engine.max_running,
            "token_budget": engine.token_budget,
            "max_len": engine.max_model_len,
            "prefix_cache": int(engine.prefix_cache),
            "admission": int(Admission[engine.admission.upper()]),
            "quantum": engine.quantum,
            "reservation_steps": engine.reservation_steps,
            "lease_us": engine.lease_us,
            "masks": engine.masks,
        } | options.engine
        program = options.engine_command or self.description.engine_command or ENGINE_MODULE
        command = [*program, "--run-dir", str(self.run_dir)]
        command += ["--segment", f"blink-{self.name}", "--name", self.model_name, "--verbosity", options.verbosity]
        for name, value in sizes.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        if self.model is not None:
            command += ["--model", str(self.model)]
        command += ["--exit-with-parent", str(os.getpid())]
        command += ["--batch-invariant"] * options.batch_invariant + ["--capture"] * options.capture
        command += ["--kv-sanitizer"] * (self.model is not None and (options.kv_sanitizer or engine.kv_sanitizer))
        return command

    def _frontend_command(self) -> list[str]:
        assert self.run_dir is not None
        # Free ports are drawn once: a rig that is started again is found where it was.
        port = self._port if self._drawn_port is None else self._drawn_port
        return [
            *("-m", "blink_core.frontend.main", "--engine", str(self.run_dir / "engine.json"), "--ring", "0"),
            *("--host", self._host, "--port", str(port), "--model", str(self.model)),
            *("--served-name", self.model_name, "--ready", str(self.run_dir / "frontend.json")),
            *("--log-level", self.options.verbosity, "--exit-with-parent", str(os.getpid())),
            *("--heartbeat-limit", str(self.options.heartbeat_limit_s)),
        ]

    def _spawn(self, name: str, arguments: list[str]) -> None:
        assert self._scratch is not None
        folder = self._scratch.path
        environment = dict(os.environ)
        if name == "engine":
            threads = self.options.threads or max(1, len(os.sched_getaffinity(0)) // 2)
            environment |= {v: str(threads) for v in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        path = self._log_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != folder and not (folder / path.name).is_symlink():
            (folder / path.name).symlink_to(path)
        with path.open("ab") as log:  # a process that is started again goes on with the log of its predecessor
            self._processes[name] = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(self._scratch.fd,),  # its files are there as long as it lives
                start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher, which stops in order
            )

    def _await(self, name: str, ready: Path, deadline: float, cancelled: Callable[[], bool]) -> None:
        process = self._processes[name]
        while not ready.exists():
            if cancelled():
                raise StartCancelled(f"cancelled before {name} was ready")
            try:
                code = process.wait(0.02)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise RigFailure(f"{name} was not ready in time\n{self.log_tail(name)}") from None
                continue
            raise RigFailure(f"{name} exited with status {code} before it was ready\n{self.log_tail(name)}")

    def _log_path(self, name: str) -> Path:
        folder = self.options.logs or self.run_dir
        return Path(os.devnull) if folder is None else folder / f"{name}.log"

    def log_tail(self, name: str, lines: int = 12) -> str:
        """Last lines of a process's log."""
        path = self._log_path(name)
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def wait(self, timeout: float) -> str | None:
        """Waits for a process of the rig to die; returns which and why, or None when `timeout` seconds are over."""
        deadline = time.monotonic() + timeout
        while True:
            for name, process in self._processes.items():
                code = process.poll()
                if code is not None:
                    return f"{name} exited with status {code}\n{self.log_tail(name)}"
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(iter(self._processes.values())).wait(min(left, 0.1))

    def stop(self) -> None:
        """Stops front end, then engine; kills what does not end in time. Idempotent."""
        if self._descriptor is not None:
            self.on_stop()
        for name in ("frontend", "engine"):
            process = self._processes.pop(name, None)
            if process is None:
                continue
            self._end(process, signal.SIGTERM)
        self._keep_kv_reports()
        # A killed engine leaves the name behind.
        (SHM_DIR / f"blink-{self.name}").unlink(missing_ok=True)
        self._descriptor = self._memory = self._base_url = None
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = self.run_dir = None

    def _keep_kv_reports(self) -> None:
        """What the KV sanitizer of the engine that has ended said; the file goes with its folder."""
        kv, self._kv = self._kv, None
        if kv is None or not (made := kv.counters()["reports"]):
            return
        if not self.kv_reported:
            with contextlib.suppress(OSError, ValueError):
                self.kv_first_report = next(iter(kv.reports()), {})
        self.kv_reported += made

    @staticmethod
    def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # one that was stopped would not see it
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
