"""A front end that is killed, frozen or started again beside one that works (issue 3, design section 3)."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from blink_core.abi.enums import EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from blink_core.frontend.epoch_word import number_of
from blink_core.frontend.ring_client import RingClient
from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from tests.waiting import DEADLINE_S, until
from verification.models.tiny import build_named
from verification.stalls import Stalls

MAX_LEN = 8192
SIZES = {"pages": 2 + MAX_LEN // 16 + 64, "max_len": MAX_LEN, "slots": 16, "sq_entries": 64, "cq_entries": 64}
LEASE_US = 3_000_000
LATE_S = 20.0  # that a busy machine may be late by


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_named("llama-gqa3", tmp_path_factory.mktemp("long"), max_positions=MAX_LEN).path


@pytest.fixture
def start(long_model: Path) -> Iterator[Callable[..., LocalRig]]:
    """Starts a rig with HTTP front end on ring 0; engine fields override SIZES."""
    rigs: list[LocalRig] = []

    def begin(**fields: int) -> LocalRig:
        rig = LocalRig(load_rig("local"), long_model, options=LocalOptions(engine=SIZES | fields))
        rig.start()
        rigs.append(rig)
        return rig

    yield begin
    for rig in rigs:
        rig.stop()


def request_of(rig: LocalRig, **fields: Any) -> dict[str, Any]:
    return {
        "model": rig.model_name,
        "prompt": [5, 6, 7],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }


class Stream:
    """A streamed completion read by its own thread: pieces and error so far."""

    def __init__(self, rig: LocalRig, max_tokens: int) -> None:
        self.pieces, self.failure = 0, ""
        self.error: Any = None
        self.finished = False
        self._first = threading.Event()
        self._body = request_of(rig, max_tokens=max_tokens)
        self._url = f"{rig.base_url}/v1/completions"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=DEADLINE_S) as response:
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        self.finished = True
                    elif data:
                        message = json.loads(data)
                        self.error = message.get("error", self.error)
                        self.pieces += "choices" in message
                        self._first.set()
        except httpx.HTTPError as e:
            self.failure = repr(e)
        finally:
            self._first.set()

    def await_first(self) -> None:
        assert self._first.wait(DEADLINE_S)
        assert self.pieces, self.failure or self.error

    def await_end(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the stream hangs"


def held(rig: LocalRig) -> tuple[int, int]:
    """(requests alive, pages that running requests hold), from raw memory between steps."""
    with rig.memory.hold():
        header = rig.memory.snapshot().header
    free = int(header["free_pages"]) + int(header["idle_cached"]) + int(header["quarantined"])
    return int(header["live"]), SIZES["pages"] - 2 - free


def await_free(rig: LocalRig, deadline_s: float) -> None:
    until(lambda: held(rig) == (0, 0), "requests are alive or hold pages", deadline_s)


def tokens_of_ring(rig: LocalRig, count: int, ring: int = 1) -> int:
    """Runs one request of `count` tokens on another ring to its end; returns the tokens that came."""
    return run_to_end(rig.ring(ring), count)


def run_to_end(client: RingClient, count: int) -> int:
    """Runs one request of `count` tokens; returns the tokens that came."""
    client.submit([9, 8, 7], SamplingParams(max_tokens=count, ignore_eos=True))
    got, deadline = 0, time.monotonic() + DEADLINE_S
    while client.live:
        assert time.monotonic() < deadline, f"{got} of {count} tokens in {DEADLINE_S} s"
        events = client.poll(1.0)
        got += int((events["kind"] == EventKind.TOKEN).sum())
        ends = events[events["kind"] >= EventKind.FINISH]
        assert all(e["kind"] == EventKind.FINISH and e["reason"] == FinishReason.LENGTH for e in ends), ends
    return got


def test_killed_front_end_frees_its_kv_by_lease(start: Callable[..., LocalRig]) -> None:
    """Catches: requests and pages of a dead front end that live until somebody attaches, or for ever."""
    rig = start(lease_us=LEASE_US)
    stream = Stream(rig, MAX_LEN - 3)
    stream.await_first()
    assert held(rig)[1] > 0
    rig.send("frontend", signal.SIGKILL)
    await_free(rig, LEASE_US / 1e6 + LATE_S)
    assert tokens_of_ring(rig, 20) == 20
    stream.await_end()
    assert not stream.finished


def test_restarted_front_end_attaches_by_epoch(start: Callable[..., LocalRig]) -> None:
    """Catches: a front end that does not come back while its predecessor's requests live, or shows their events."""
    rig = start(lease_us=0)  # only the epoch ends them
    stream = Stream(rig, MAX_LEN - 3)
    stream.await_first()
    expected = httpx.post(
        f"{rig.base_url}/v1/completions", json=request_of(rig, max_tokens=8, stream=False), timeout=DEADLINE_S
    ).json()["choices"][0]["text"]
    epoch = number_of(int(rig.memory.snapshot().rings[0]["epoch"]))
    rig.send("frontend", signal.SIGKILL)
    assert held(rig)[1] > 0, "without a lease nobody ends them yet"
    rig.restart("frontend")
    await_free(rig, LATE_S)
    assert number_of(int(rig.memory.snapshot().rings[0]["epoch"])) == epoch + 1
    for _ in range(3):
        answer = httpx.post(
            f"{rig.base_url}/v1/completions", json=request_of(rig, max_tokens=8, stream=False), timeout=DEADLINE_S
        )
        assert answer.json()["choices"][0]["text"] == expected


def test_frozen_front_end_pauses_only_its_own_rows(start: Callable[..., LocalRig]) -> None:
    """Catches: a front end that stops reading and holds up another's streams, or whose own stream loses tokens."""
    rig = start(lease_us=0)
    stream = Stream(rig, 3000)  # seconds from its end when its first token has come
    stream.await_first()
    rig.send("frontend", signal.SIGSTOP)
    try:
        # More than its completion queue takes: it is paused by then, and still the other ring gets all it asks for.
        assert tokens_of_ring(rig, 4 * SIZES["cq_entries"]) == 4 * SIZES["cq_entries"]
        assert held(rig)[0] == 1, "the frozen front end's request has ended"
    finally:
        rig.send("frontend", signal.SIGCONT)
    stream.await_end()
    assert stream.finished, stream.error or stream.failure
    assert stream.pieces >= 1


def test_frozen_front_end_loses_its_lease_and_says_so(start: Callable[..., LocalRig]) -> None:
    """Catches: KV held for ever for a frozen front end; a stream that hangs or looks whole after the lease was lost."""
    rig = start(lease_us=LEASE_US)
    stream = Stream(rig, MAX_LEN - 3)
    stream.await_first()
    rig.send("frontend", signal.SIGSTOP)
    try:
        await_free(rig, LEASE_US / 1e6 + LATE_S)
    finally:
        rig.send("frontend", signal.SIGCONT)
    stream.await_end()
    assert not stream.finished
    assert stream.error is not None, stream.failure
    assert "LEASE_LOST" in stream.error["message"]
    answer = httpx.post(
        f"{rig.base_url}/v1/completions", json=request_of(rig, max_tokens=8, stream=False), timeout=DEADLINE_S
    )
    assert answer.status_code == 200, answer.text


def test_frozen_front_end_that_was_replaced_leaves_the_ring(start: Callable[..., LocalRig]) -> None:
    """Catches: a front end that was stopped while another attached to its ring, and that goes on to write the queue,
    lease and credits of the other's epoch, takes its events, or throws it out again; streams that are not told why."""
    rig = start(lease_us=0)
    stream = Stream(rig, MAX_LEN - 3)
    stream.await_first()
    rig.send("frontend", signal.SIGSTOP)
    try:
        successor = rig.ring(0)
    finally:
        rig.send("frontend", signal.SIGCONT)
    epoch = int(rig.memory.snapshot().rings[0]["epoch"])
    stream.await_end()
    assert not stream.finished
    assert stream.error is not None, stream.failure
    assert f"superseded by epoch {number_of(epoch)}:" in stream.error["message"]
    assert run_to_end(successor, 200) == 200
    health = httpx.get(f"{rig.base_url}/health", timeout=DEADLINE_S)
    assert (health.status_code, health.json()["status"]) == (503, "dead")
    assert "superseded" in health.json()["reason"]
    refused = httpx.post(
        f"{rig.base_url}/v1/completions", json=request_of(rig, max_tokens=4, stream=False), timeout=DEADLINE_S
    )
    assert refused.status_code == 503, refused.text
    assert int(rig.memory.snapshot().rings[0]["epoch"]) == epoch
    successor.close()


def test_engine_death_is_told_within_a_second(start: Callable[..., LocalRig]) -> None:
    """Catches: clients that learn of a dead engine only by a timeout (the bound is the protocol's: issue 3)."""
    rig = start()
    stream = Stream(rig, MAX_LEN - 3)
    stream.await_first()
    with Stalls() as stalls:
        rig.send("engine", signal.SIGKILL)
        died = time.monotonic()
        stream.await_end()
        took = time.monotonic() - died
    assert took - stalls.between(died, died + took) < 1.0
    assert stream.error is not None, stream.failure
    assert stream.error["code"] == "engine_dead"
