"""`blink serve` as a user runs it: a process that answers, stops on a signal, and says so when its engine dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

START_S = 120.0
STOP_S = 60.0
BLINK = [sys.executable, "-c", "from verification.cli import main; main()"]


class Serve:
    """A running `blink serve`, and what it has printed so far."""

    def __init__(self, model: Path) -> None:
        self.process = subprocess.Popen(
            [*BLINK, "serve", "--model", str(model), "--rig", "local", "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.on_line: Callable[[str], None] = lambda line: None
        self.base_url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self.on_line(line)
            if line.startswith("serving at "):
                self.base_url = line.split()[-1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        assert self._ready.wait(START_S), "not ready in time"
        assert self.base_url, "".join(self.lines)

    def wait_over(self) -> tuple[int, str]:
        code = self.process.wait(STOP_S)
        self._reader.join(STOP_S)
        return code, "".join(self.lines)

    def child(self, module: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (found,) = [child for child in children if module in " ".join(child.cmdline())]
        return found


@pytest.fixture
def serve(tiny_model: Path) -> Iterator[Serve]:
    """A ready server; whatever is left of it afterwards is killed."""
    server = Serve(tiny_model)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            family = [*psutil.Process(server.process.pid).children(recursive=True), psutil.Process(server.process.pid)]
            for member in family:
                member.kill()
            psutil.wait_procs(family, STOP_S)


def segments(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"blink-{pid}-")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_answers_and_stops_on_a_signal(serve: Serve, number: signal.Signals) -> None:
    """Catches: a server that prints an address which does not answer; processes or shared memory left behind."""
    models = httpx.get(f"{serve.base_url}/v1/models", timeout=START_S).json()
    name = models["data"][0]["id"]
    reply = httpx.post(
        f"{serve.base_url}/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 3}, timeout=START_S
    )
    assert reply.status_code == 200, reply.text
    assert 1 <= reply.json()["usage"]["completion_tokens"] <= 3
    children = psutil.Process(serve.process.pid).children(recursive=True)
    assert len(children) >= 2
    assert segments(serve.process.pid)
    serve.process.send_signal(number)
    code, output = serve.wait_over()
    assert code == 0, output
    assert psutil.wait_procs(children, STOP_S)[1] == []
    assert segments(serve.process.pid) == []


def test_a_dead_engine_ends_the_server(serve: Serve) -> None:
    """Catches: `blink serve` staying up, or leaving with exit 0, after its engine was killed."""
    front_end = serve.child("blink_core.frontend.main")
    serve.child("engine_main").kill()
    code, output = serve.wait_over()
    assert code == 1, output
    assert "engine exited with status -9" in output
    assert psutil.wait_procs([front_end], STOP_S)[1] == []
    assert segments(serve.process.pid) == []


def test_a_dead_front_end_comes_back_on_its_port(serve: Serve) -> None:
    """Catches: `blink serve` that ends, or moves to another port, because its front end was killed."""
    old, engine = serve.child("blink_core.frontend.main"), serve.child("engine_main")
    again = threading.Event()
    serve.on_line = lambda line: again.set() if line.startswith("serving again at ") else None
    old.kill()
    assert again.wait(START_S), "".join(serve.lines)
    name = httpx.get(f"{serve.base_url}/v1/models", timeout=START_S).json()["data"][0]["id"]
    reply = httpx.post(
        f"{serve.base_url}/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 3}, timeout=START_S
    )
    assert reply.status_code == 200, reply.text
    assert serve.child("engine_main").pid == engine.pid
    assert serve.child("blink_core.frontend.main").pid != old.pid


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """Catches: a broken model file answered with a hang, a traceback without reason, or exit 0."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    code, output = Serve(path).wait_over()
    assert code == 2, output
    assert "could not start" in output
    assert "broken.gguf" in output
