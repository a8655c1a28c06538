"""A served model in one process: engine, shipped front end and HTTP server in threads. For `hil_rigs.parts`.

It starts in a fraction of the time of the two processes of a rig; whatever one process does to another needs those.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import uvicorn

from blink_core.abi.dtypes import DTYPES
from blink_core.frontend import engine_client
from blink_core.frontend.app import ServerConfig, create_app
from blink_core.frontend.engine_client import HEARTBEAT_LIMIT_S, connect
from blink_core.frontend.main import Server, listen
from blink_core.frontend.tokenizer import load_tokenizer
from blink_core.runtime.cpu import CpuRuntime
from blink_core.runtime.descriptor import EngineDescriptor, Memory
from blink_core.runtime.engine_main import parse_arguments, serve_model
from blink_core.transport.interface import deadline_after
from blink_core.transport.shm import Segment, ShmTransport

START_S = 30.0
HOLD_LIMIT_S = 5.0


class HeldTransport(ShmTransport):
    """A ring in shared memory whose completion tail can be held back: polls then find nothing until `hold`'s events are
    there, and all of them at once."""

    def __init__(self, segment: Segment, base: int, nbytes: int, tail: int) -> None:
        """tail: offset of the tail in the ring."""
        super().__init__(segment, base, nbytes)
        self._tail, self._until, self._limit = tail, 0, 0.0

    def hold(self, events: int) -> None:
        """Until so many more than now are published, at most HOLD_LIMIT_S: an engine may have less to say."""
        seen = int.from_bytes(self.wait(self.post_read(self._tail, 8), deadline_after(1.0)), "little")
        self._limit, self._until = time.monotonic() + HOLD_LIMIT_S, seen + events

    def wait_word(self, offset: int, old: int, timeout: float) -> int:
        deadline, found = deadline_after(timeout), old
        while True:
            now = time.monotonic()
            found = super().wait_word(offset, found, max(0.0, deadline - now))
            if offset != self._tail or found >= self._until or now >= self._limit:
                return found
            if now >= deadline:
                return old


class ServedModel:
    """Serves `model` on a free port of this machine until `close`."""

    def __init__(
        self, model: str, folder: str, sizes: dict[str, int], *, heartbeat_limit_s: float = HEARTBEAT_LIMIT_S
    ) -> None:
        """sizes: fields of EngineConfig. Raises what engine or front end raise when they cannot start."""
        command = ["--run-dir", folder, "--segment", "unused", "--model", model, "--name", "tiny"]
        for name, value in sizes.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        config, served = serve_model(parse_arguments(command))
        self._runtime = CpuRuntime(config, f"blink-served-{os.getpid()}-{secrets.token_hex(4)}")
        runtime = self._runtime
        self._descriptor = Path(folder) / "engine.json"
        state, log = (Memory(m.fd, m.nbytes) for m in (runtime.state, runtime.log))
        name = runtime.segment.name
        EngineDescriptor(os.getpid(), name, config, served.info, state, log, None, None).write(self._descriptor)
        self._engine = threading.Thread(target=runtime.serve, args=(served.step,), daemon=True)
        self._engine.start()
        self._model, self._heartbeat_limit_s = model, heartbeat_limit_s
        self._listener = listen("127.0.0.1", 0)
        self._ready, self._error = threading.Event(), ""
        self._server: Server | None = None
        self._transport: HeldTransport | None = None
        self._front = threading.Thread(target=self._run, daemon=True)
        self._front.start()
        if not self._ready.wait(START_S) or self._error:
            raise RuntimeError(f"the front end did not start: {self._error or 'in time'}")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve(self._listener))
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            self._ready.set()

    async def _serve(self, listener: socket.socket) -> None:
        with mock.patch.object(engine_client, "ShmTransport", self._held):
            engine = await connect(self._descriptor, 0, heartbeat_limit_s=self._heartbeat_limit_s)
        eos = tuple(EngineDescriptor.read(self._descriptor).model.eos_token_ids)
        app = create_app(engine, load_tokenizer(self._model), ServerConfig(served_name="tiny", eos_token_ids=eos))
        config = uvicorn.Config(
            app, http="httptools", loop="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        self._server = Server(config, self._ready.set)
        await self._server.serve(sockets=[listener])

    def _held(self, segment: Segment, base: int, nbytes: int) -> HeldTransport:
        fields = DTYPES["GpuLine"].fields
        assert fields is not None
        tail = self._runtime.layouts["Ring"].sections["gpu"].offset + fields["cq_tail"][1]
        self._transport = HeldTransport(segment, base, nbytes, tail)
        return self._transport

    def hold(self, events: int) -> None:
        """The front end gets the next events once so many are there, in one poll. See `HeldTransport.hold`."""
        assert self._transport is not None  # it is ready
        self._transport.hold(events)

    def url(self) -> str:
        """http://host:port."""
        return "http://{}:{}".format(*self._listener.getsockname()[:2])

    def live(self) -> int:
        """Requests that the scheduler has rows for."""
        state = self._runtime.layouts["State"].views(self._runtime.state.buffer)
        return int(state["header"]["running"][0])

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._front.join(3.0)
        self._runtime.request_stop()
        self._engine.join(5.0)
        self._runtime.close()
