"""Front-end process: `python -m blink_core.frontend.main --engine engine.json --model PATH ...` (design section 8).

Connects to one ring of a running engine, serves HTTP, and writes a READY file (`{"port", "host", "pid"}`) once it
accepts connections. SIGTERM and SIGINT let running requests end within the grace period; then it exits with 0.
Exit status 2 and one line on stderr: it could not start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from blink_core.frontend.app import ServerConfig, create_app
from blink_core.frontend.chat import ChatTemplateError
from blink_core.frontend.engine_api import EngineClient, EngineError
from blink_core.frontend.tokenizer import TokenizerError, load_tokenizer
from blink_core.runtime.parent import ParentWatch

CONNECT_TIMEOUT_S = 30.0


class StartError(Exception):
    """The front end cannot start; the message is one line for the user."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m blink_core.frontend.main", description="Blink's front end process")
    parser.add_argument("--engine", type=Path, required=True, help="runtime descriptor that the engine wrote")
    parser.add_argument("--ring", type=int, default=0, help="ring of this front end (default 0)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free port, see --ready")
    parser.add_argument("--model", type=Path, required=True, help=".gguf file or HuggingFace directory (tokeniser)")
    parser.add_argument("--served-name", required=True, help="model name of the API")
    parser.add_argument("--ready", type=Path, help="file to write once connections are accepted")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds for running requests at shutdown")
    parser.add_argument("--event-timeout", type=float, default=600.0, help="seconds to wait for one engine event")
    parser.add_argument("--max-body", type=int, default=0, help="bytes of a request body (0: from the model's length)")
    parser.add_argument("--heartbeat-limit", type=float, default=5.0, help="seconds without one: the engine is lost")
    parser.add_argument("--exit-with-parent", type=int, metavar="PID", help="stop when the launching process is gone")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser.parse_args(arguments)


def read_descriptor(path: Path) -> dict[str, Any]:
    """The `model` object of the runtime descriptor. Raises StartError."""
    try:
        descriptor = json.loads(path.read_text(encoding="utf-8"))
        model = descriptor["model"]
        ids = model["eos_token_ids"]
        if not all(type(token) is int for token in ids):
            raise TypeError(f"eos_token_ids holds {ids!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartError(f"engine descriptor {path}: {type(error).__name__}: {error}") from None
    return dict(model)


async def _connect(path: Path, ring: int, heartbeat_limit_s: float) -> EngineClient:
    from blink_core.frontend.engine_client import connect

    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await connect(path, ring, heartbeat_limit_s=heartbeat_limit_s)
    except TimeoutError:
        raise StartError(f"engine descriptor {path}: no connection within {CONNECT_TIMEOUT_S:g} s") from None
    except (OSError, ValueError, KeyError, TypeError, EngineError) as error:
        raise StartError(f"engine descriptor {path}: {error}") from None


def base_url(host: str, port: int) -> str:
    """http://host:port, with an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises StartError."""
    if not 0 <= port <= 65535:  # getaddrinfo would wrap it around
        raise StartError(f"cannot listen on {host} port {port}: a port is 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        raise StartError(f"cannot listen on {host} port {port}: {error}") from None
    return listener


def raise_file_limit() -> None:
    """A burst of clients needs a descriptor each; the usual soft limit of 1,024 is lower than the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def write_ready(path: Path, content: dict[str, Any]) -> None:
    """Atomically: a reader sees the whole file or none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)


class Server(uvicorn.Server):
    """uvicorn that calls `on_ready` once it accepts connections, and leaves signals to `serve`.

    uvicorn's own handling raises the signal again after the shutdown, so a clean SIGTERM would look like a crash.
    """

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    def stop(self) -> None:
        """First call: graceful. Second call: at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def serve(arguments: argparse.Namespace) -> None:
    """Run until a signal. Raises StartError."""
    parent = ParentWatch(arguments.exit_with_parent)  # first: loading a tokeniser takes long
    model = read_descriptor(arguments.engine)
    try:
        tokenizer = load_tokenizer(arguments.model)
    except TokenizerError as error:
        raise StartError(f"model {arguments.model}: {error}") from None
    listener = listen(arguments.host, arguments.port)
    engine = await _connect(arguments.engine, arguments.ring, arguments.heartbeat_limit)
    config = ServerConfig(
        served_name=arguments.served_name,
        eos_token_ids=tuple(model["eos_token_ids"]),
        max_body_bytes=arguments.max_body,
        event_timeout_s=arguments.event_timeout,
    )
    try:
        app = create_app(engine, tokenizer, config)
    except ChatTemplateError as error:
        await engine.close()
        raise StartError(f"model {arguments.model}: {error}") from None
    host, port = listener.getsockname()[:2]
    url = base_url(arguments.host, port)

    def on_ready() -> None:
        if arguments.ready is not None:
            write_ready(arguments.ready, {"url": url, "port": port, "host": host, "pid": os.getpid()})
        logging.getLogger("blink.frontend").info("serving %s on %s", arguments.served_name, url)

    server = Server(
        uvicorn.Config(
            app,
            http="httptools",
            loop="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, round(arguments.grace)),
        ),
        on_ready,
    )
    loop = asyncio.get_running_loop()

    def stop_soon() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: it is stopping already
            loop.call_soon_threadsafe(server.stop)

    parent.on_gone(stop_soon)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.serve(sockets=[listener])


def main(arguments: list[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    logging.basicConfig(
        level=parsed.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(parsed))
    except StartError as error:
        print(f"blink front end: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
