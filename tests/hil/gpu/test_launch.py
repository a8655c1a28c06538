"""Every way of launching steps: the protocol on the no-op model, and the ends of the loop; skipped without a GPU."""

from __future__ import annotations

import argparse
import os
import secrets
import threading
import time

import numpy as np
import pytest

from blink_core import _native
from blink_core.abi.definition import STATUS_LINE
from blink_core.abi.enums import EngineState, LogKind
from blink_core.abi.params import SamplingParams
from tests.hil.gpu.missing import MISSING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

if MISSING is None:
    import cupy as cp

    from blink_core.runtime.launch import DeviceDriven, LaunchOptions, make_runtime
    from hil_rigs.gpu.runtime_check import noop, noop_config
    from hil_rigs.gpu.session import ask, client_of, running

DEVICE_DRIVEN = ("fire", "tail", "switch", "auto")
PROMPT = np.arange(20, dtype=np.int32)


def wait_for(runtime: DeviceDriven, state: EngineState) -> None:
    """Returns once the engine has told the state. AssertionError after 5 s."""
    word = runtime._status + STATUS_LINE.offsets()["state"]
    deadline = time.monotonic() + 5.0
    while (seen := runtime.status("state")) != state:
        assert time.monotonic() < deadline, f"state {EngineState(seen).name} after 5 s, expected {state.name}"
        _native.wait_word(word, seen, 100_000)


@pytest.mark.parametrize("strategy", DEVICE_DRIVEN)
def test_protocol(strategy: str) -> None:
    """Catches: a step that a way of launching loses, runs twice or by the graph of another bucket: over 1,000 steps of
    every bucket each token follows from its position."""
    found = noop(strategy, argparse.Namespace())
    assert found["steps"] > 1000


@pytest.mark.parametrize("strategy", DEVICE_DRIVEN)
def test_drain_and_stop(strategy: str) -> None:
    """Catches: a loop that a drain ends too early, that serves new requests after it, or that a stop does not end."""
    with running(noop_config(), None, LaunchOptions(strategy=strategy, step_limit_s=5.0, run_limit_s=40.0)) as runtime:
        assert isinstance(runtime, DeviceDriven)
        client = client_of(runtime)
        before = ask(client, [(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True))])
        runtime.request_drain()
        wait_for(runtime, EngineState.DRAINED)
        after = ask(client, [(PROMPT, SamplingParams(max_tokens=3))])
    assert [a.ended for a in before] == ["LENGTH"]
    assert [a.ended for a in after] == ["ERROR DRAINING"]
    assert runtime.ended()


@pytest.mark.parametrize("strategy", DEVICE_DRIVEN)
def test_failure_ends_requests_and_the_loop(strategy: str) -> None:
    """Catches: a step without a graph that leaves its requests without an end, an engine that does not say why, and a
    loop that runs on after the failure although it is told to stop; a request that was accepted and is told that it was
    refused, or the other way round: who lives at the failure ends by it, who comes later is refused (R6)."""
    options = LaunchOptions(strategy=strategy, step_limit_s=5.0, run_limit_s=20.0)
    runtime = make_runtime(noop_config(), f"blink-gpu-{os.getpid()}-{secrets.token_hex(4)}", None, options)
    assert isinstance(runtime, DeviceDriven)
    runtime._tables[0].fill(0)  # buckets of no tokens: nothing fits
    cp.cuda.Device().synchronize()
    reasons: list[str] = []
    thread = threading.Thread(target=runtime.serve, args=(reasons.append,), daemon=True)
    thread.start()
    request = (PROMPT, SamplingParams(max_tokens=3))
    try:
        client = client_of(runtime)
        answers = ask(client, [request] * 8)  # some of them may come after the failure
        wait_for(runtime, EngineState.FAILED)
        late = ask(client, [request])
        why = runtime.failure()
        entries = runtime.layouts["Log"].views(runtime.log.buffer)["entries"].copy()
    finally:
        runtime.request_stop()
        thread.join(15.0)
        runtime.close()
    assert not thread.is_alive()
    (failed,) = np.flatnonzero((entries["kind"] == LogKind.STATE) & (entries["a"] == EngineState.FAILED))
    accepted = int((entries["kind"][:failed] == LogKind.ACCEPT).sum())
    assert accepted >= 1
    assert [a.ended for a in answers] == ["ERROR MODEL_ERROR"] * accepted + ["ERROR DRAINING"] * (8 - accepted)
    assert [a.ended for a in late] == ["ERROR DRAINING"]
    assert not (entries["kind"][failed:] == LogKind.ACCEPT).any()
    assert why is not None
    assert "no step graph fits" in why


@pytest.mark.parametrize("strategy", ["fire", "tail", "switch"])
def test_step_that_ends_late(strategy: str) -> None:
    """Catches: a step beyond its limit that nobody calls overdue because the scheduler was not there while it ran, and
    it did end."""
    options = LaunchOptions(strategy=strategy, step_limit_s=0.1, run_limit_s=20.0, noop_step_us=4e5)
    with running(noop_config(max_rows=1, token_budget=16), None, options) as runtime:
        assert isinstance(runtime, DeviceDriven)
        answers = ask(client_of(runtime), [(PROMPT, SamplingParams(max_tokens=3))])
        wait_for(runtime, EngineState.FAILED)
        why = runtime.failure()
    assert [a.ended for a in answers] == ["ERROR MODEL_ERROR"]
    assert why is not None
    assert "took longer than its limit" in why
