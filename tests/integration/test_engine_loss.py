"""An engine that dies, or stands still, under a real front end: every client is told, at once, and nothing hangs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from tests.waiting import DEADLINE_S, until
from verification.models.tiny import build_named

HEARTBEAT_LIMIT_S = 3.0  # a busy machine keeps a healthy scheduler waiting for less
MAX_LEN = 16384  # a stream of so many tokens is far from its end when its first token has come
SIZES = {"pages": 2 + MAX_LEN // 16, "max_len": MAX_LEN, "slots": 16, "sq_entries": 64, "cq_entries": 64}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_named("llama-gqa3", tmp_path_factory.mktemp("long"), max_positions=MAX_LEN).path


@pytest.fixture
def rig(long_model: Path) -> Iterator[LocalRig]:
    options = LocalOptions(engine=SIZES, heartbeat_limit_s=HEARTBEAT_LIMIT_S)
    with LocalRig(load_rig("local"), long_model, options=options) as rig:
        yield rig


def body(rig: LocalRig, **fields: Any) -> dict[str, Any]:
    return {"model": rig.model_name, "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, **fields}


@contextmanager
def stream(rig: LocalRig) -> Iterator[Iterator[str]]:
    """The `data:` lines of a long completion, after the first one has come."""
    request = body(rig, stream=True, max_tokens=MAX_LEN - 3)
    with httpx.stream("POST", f"{rig.base_url}/v1/completions", json=request, timeout=DEADLINE_S) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        assert "choices" in json.loads(next(lines))
        yield lines


def error_at_the_end(lines: Iterator[str]) -> dict[str, Any]:
    """The error object that ends a stream; tokens may come before it, nothing after it."""
    rest = list(lines)
    assert "[DONE]" not in rest, "the stream ended as if it were whole"
    error: dict[str, Any] = json.loads(rest[-1])["error"]
    assert all("error" not in json.loads(line) for line in rest[:-1])
    return error


def health(rig: LocalRig) -> httpx.Response:
    return httpx.get(f"{rig.base_url}/health", timeout=DEADLINE_S)


def complete(rig: LocalRig) -> httpx.Response:
    return httpx.post(f"{rig.base_url}/v1/completions", json=body(rig, max_tokens=4), timeout=DEADLINE_S)


def await_health(rig: LocalRig, status: int, reason: str = "") -> None:
    def told() -> bool:
        seen = health(rig)
        return seen.status_code == status and reason in seen.json()["reason"]

    until(told, f"health does not say {status} {reason}")


def test_killed_engine_ends_streams_and_refuses_requests(rig: LocalRig) -> None:
    """The killed engine stays a zombie here: nobody waits for it before the end.

    Catches: B03, a stream that hangs or looks whole when its engine dies; a dead engine taken for a live one because
    its pid is still there; 500 or a hang for later requests.
    """
    with stream(rig) as lines:
        os.kill(rig.pid("engine"), signal.SIGKILL)
        error = error_at_the_end(lines)
    assert error["code"] == "engine_dead"
    assert f"engine process {rig.pid('engine')} is gone" in error["message"], "found by its heartbeat alone"
    assert Path(f"/proc/{rig.pid('engine')}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    for _ in range(2):
        refused = complete(rig)
        assert refused.status_code == 503
        assert "is gone" in refused.json()["error"]["message"]
    seen = health(rig)
    assert (seen.status_code, seen.json()["status"]) == (503, "dead")
    assert "is gone" in seen.json()["reason"]


def test_engine_that_stood_still_is_taken_back(rig: LocalRig) -> None:
    """Catches: requests that hang while the engine stands still; a front end that stays dead for ever after a pause;
    tokens of a request that was given up in the stream of one that came later; KV of it that is kept."""
    expected = complete(rig).json()["choices"][0]["text"]
    engine = rig.pid("engine")
    for _ in range(2):
        with stream(rig) as lines:
            os.kill(engine, signal.SIGSTOP)
            try:
                error = error_at_the_end(lines)
                assert f"no heartbeat for {HEARTBEAT_LIMIT_S:g} s" in error["message"]
                assert complete(rig).status_code == 503
                await_health(rig, 503, "no heartbeat")
            finally:
                os.kill(engine, signal.SIGCONT)
        await_health(rig, 200)
        answer = complete(rig)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected
        with rig.memory.hold():
            snapshot = rig.memory.snapshot()
        assert int(snapshot.header["live"]) == 0
        assert len(snapshot.free_list) + int(snapshot.header["idle_cached"]) == snapshot.config.pages - 2


def test_engine_that_dies_while_it_stands_still(rig: LocalRig) -> None:
    """Catches: a client that waits for the heartbeat of a process which is gone, and names the wrong cause."""
    with stream(rig) as lines:
        os.kill(rig.pid("engine"), signal.SIGSTOP)
        assert "no heartbeat" in error_at_the_end(lines)["message"]
    os.kill(rig.pid("engine"), signal.SIGKILL)
    await_health(rig, 503, "is gone")
    assert complete(rig).status_code == 503
