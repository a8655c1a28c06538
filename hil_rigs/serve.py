"""`blink serve`: run a model on a rig until it is told to stop [design 10]."""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from blink_core.model_store import ModelStoreError, resolve
from hil_rigs.description import RigError, load_rig
from hil_rigs.local import LocalOptions, LocalRig, RigFailure, StartCancelled

EXIT_ENGINE_DIED = 1
EXIT_UNUSABLE = 2
RESTARTS, RESTART_WINDOW_S = 3, 60.0  # front ends that may die in that time before `serve` gives up


def serve(
    model: Annotated[str, typer.Option("--model", help="A pinned model's name, a .gguf file, or a folder.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="TCP port; 0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    rig: Annotated[str, typer.Option("--rig", help="A rig's name or a description's path.")] = "local",
    kv_sanitizer: Annotated[
        bool, typer.Option("--kv-sanitizer", help="Check the owner of every KV row that is read; slower.")
    ] = False,
) -> None:
    """Serve MODEL with an OpenAI-style API. Ctrl-C stops; exit 1 if the engine died, 2 if it could not start.

    A front end that dies is started again on its port; the engine and what other front ends do go on meanwhile.
    """
    try:
        description = load_rig(rig)
        path = resolve(model)
    except (RigError, ModelStoreError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from error
    with stop_signals() as stopped:
        options = LocalOptions(kv_sanitizer=kv_sanitizer)
        server = LocalRig(description, path, host=host, port=port, options=options)
        typer.echo(f"starting {path.name} on rig {description.name} ...", err=True)
        try:
            server.start(cancelled=stopped.is_set)
        except StartCancelled:
            typer.echo("stopped before it was ready", err=True)
            return
        except Exception as error:
            server.stop()
            typer.echo(f"error: could not start: {error}", err=True)
            raise typer.Exit(EXIT_UNUSABLE) from error
        try:
            typer.echo(
                f"serving at {server.base_url}\n\n{example_request(server.base_url, server.model_name)}\n", err=True
            )
            reason = wait_until_over(server, stopped)
        finally:
            typer.echo("stopping ...", err=True)
            server.stop()
    if reason is not None:
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(EXIT_ENGINE_DIED)


def example_request(base_url: str, model_name: str) -> str:
    """A curl command line that shows the server at work."""
    body = {"model": model_name, "messages": [{"role": "user", "content": "What is a GPU?"}], "max_tokens": 48}
    return (
        f"  curl -N {base_url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps({**body, 'stream': True}))}"
    )


def wait_until_over(server: LocalRig, stopped: threading.Event) -> str | None:
    """Wait for a stop signal (returns None) or for the end of the rig (returns the reason).

    A dead front end is started again, unless it has died more than RESTARTS times within RESTART_WINDOW_S: then, or
    when it does not come back, that is the reason.
    """
    deaths: list[float] = []
    while not stopped.is_set():
        reason = server.wait(timeout=0.5)
        if reason is None:
            continue
        if server.exited("engine") is not None:
            return reason
        now = time.monotonic()
        deaths = [at for at in deaths if now - at < RESTART_WINDOW_S] + [now]
        if len(deaths) > RESTARTS:
            return f"{reason}\n(started again {RESTARTS} times within {RESTART_WINDOW_S:g} s)"
        typer.echo(f"warning: {reason}\nstarting the front end again ...", err=True)
        try:
            server.restart("frontend", cancelled=stopped.is_set)
        except StartCancelled:
            return None
        except RigFailure as error:
            return str(error)
        typer.echo(f"serving again at {server.base_url}", err=True)
    return None


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set. A second SIGINT interrupts a stop that itself hangs."""
    stopped = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stopped.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped.set()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
