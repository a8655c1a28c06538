"""The front-end process: descriptor errors, READY file, SIGTERM. The engine client is replaced by an echoing double."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import blink_core
from blink_core.frontend.main import StartError, listen, read_descriptor

ROOT = Path(blink_core.__file__).parents[1]
DEADLINE_S = 60.0
DESCRIPTOR = {"pid": 1, "model": {"name": "m", "eos_token_ids": [2]}}

# Runs `main` with a module in place of `engine_client`, which connects to nothing and echoes prompts.
PROCESS = """
import sys, types
from blink_core.abi.enums import FinishReason
from blink_core.frontend import engine_api, main

class Echo:
    limits = engine_api.EngineLimits(max_model_len=512, vocab_size=49152, max_prompt_len=511, slots=8)
    def health(self):
        return engine_api.EngineHealth(alive=True, state="ready")
    async def generate(self, prompt, params, *, request_id):
        for index, token in enumerate(prompt):
            yield engine_api.TokenOutput(index, token, 0.0)
        yield engine_api.Finished(FinishReason.LENGTH, len(prompt))
    async def close(self):
        print("engine client closed", flush=True)

async def connect(path, ring, *, heartbeat_limit_s):
    if ring != 0:
        raise ValueError(f"ring {ring} is not in the descriptor")
    return Echo()

double = types.ModuleType("blink_core.frontend.engine_client")
double.connect = connect
sys.modules[double.__name__] = double
sys.exit(main.main(sys.argv[1:]))
"""


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def descriptor(tmp_path: Path) -> Path:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(DESCRIPTOR), encoding="utf-8")
    return path


def wait_ready(process: subprocess.Popen[str], path: Path) -> dict[str, Any]:
    """The READY file's content. The process says on stderr that it serves only after it has written the file."""
    assert process.stderr is not None
    for line in process.stderr:  # ends when the process does
        if "serving" in line:
            break
    else:
        raise AssertionError("the front end ended before it was ready")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_ready_file_request_and_sigterm(descriptor: Path, tmp_path: Path, smollm_path: Path) -> None:
    """Catches: a wrong port in READY, a process that does not serve, or a SIGTERM that ends it uncleanly."""
    ready = tmp_path / "ready.json"
    process = start(
        *("--engine", descriptor, "--model", smollm_path, "--served-name", "smollm", "--port", 0, "--ready", ready)
    )
    try:
        content = wait_ready(process, ready)
        assert content["pid"] == process.pid
        url = f"http://127.0.0.1:{content['port']}"
        body = {"model": "smollm", "prompt": "The quick brown fox.", "max_tokens": 50}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert response.json()["choices"][0]["text"] == "The quick brown fox."
        assert httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 200
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert "engine client closed" in output
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def test_ipv6_host(descriptor: Path, tmp_path: Path, smollm_path: Path) -> None:
    """Catches: an IPv6 address without brackets in the URL, whose last group reads as the port."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    ready = tmp_path / "ready.json"
    process = start(
        *("--engine", descriptor, "--model", smollm_path, "--served-name", "smollm", "--port", 0, "--ready", ready),
        *("--host", "::1"),
    )
    try:
        content = wait_ready(process, ready)
        assert content["url"] == f"http://[::1]:{content['port']}"
        assert httpx.get(f"{content['url']}/health", timeout=DEADLINE_S).status_code == 200
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--engine": "nowhere/engine.json"}, "No such file"),
        ({"--model": "nowhere.gguf"}, "no such model"),
        ({"--ring": 7}, "ring 7 is not in the descriptor"),
        ({"--host": "203.0.113.7"}, "cannot listen on 203.0.113.7"),
    ],
)
def test_cannot_start_is_one_line_and_status_2(
    descriptor: Path, smollm_path: Path, change: dict[str, object], message: str
) -> None:
    """Catches: a traceback, a zero status or a hang where the process cannot start."""
    options: dict[str, object] = {"--engine": descriptor, "--model": smollm_path, "--served-name": "m", "--port": 0}
    options.update(change)
    process = start(*(item for pair in options.items() for item in pair))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert errors.startswith("blink front end: ")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"model": 5}', '{"model": {}}', '{"model": {"eos_token_ids": ["x"]}}', "\udcff"]
)
def test_bad_descriptors_are_named(tmp_path: Path, content: str) -> None:
    """Catches: a truncated or foreign descriptor that raises something else than StartError."""
    path = tmp_path / "engine.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(StartError, match=r"engine\.json"):
        read_descriptor(path)


def test_port_in_use_is_named() -> None:
    """Catches: a traceback when the port is taken."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1 port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(StartError, match="port 99999"):
        listen("127.0.0.1", 99999)
