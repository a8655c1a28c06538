"""Engine and front end as two processes that are stopped and killed; classes X and R.

Every wait has a deadline of its own; what is judged is that it ends in time and how, never how fast.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from verification.mutants.checkers.base import Checker, Finding, Product, found
from verification.mutants.engines import SIZES
from verification.mutants.references import model_path

MODEL = "mistral-full"
BODY: dict[str, Any] = {"model": "mistral-full", "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}
LONG = 480
ENGINE = SIZES | {"max_len": 500, "pages": 130, "slots": 16, "rings": 2}
Wrong = tuple[str, str] | None
_environ = threading.Lock()


@contextmanager
def rig_of(product: Product, *, heartbeat_limit_s: float = 5.0, **engine: int) -> Iterator[LocalRig]:
    """Both processes on the product, with its mutant in them."""
    options = LocalOptions(engine=ENGINE | engine, heartbeat_limit_s=heartbeat_limit_s, threads=1)
    rig = LocalRig(load_rig("local"), model_path(MODEL), options=options)
    with _environ:  # the rig gives its processes the environment of this one
        before = dict(os.environ)
        os.environ.update(product.environ)
        try:
            rig.start(30.0)
        finally:
            os.environ.clear()
            os.environ.update(before)
    try:
        yield rig
    finally:
        for process in ("engine", "frontend"):
            with suppress(Exception):
                rig.send(process, signal.SIGCONT)
        rig.stop()


class Pending:
    """A request under way in a thread."""

    def __init__(self, url: str, body: Mapping[str, Any], timeout: float) -> None:
        self.status, self.text = 0, ""
        self._url, self._body, self._timeout = url, dict(body), timeout
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            response = httpx.post(f"{self._url}/v1/completions", json=self._body, timeout=self._timeout)
            self.status, self.text = response.status_code, response.text
        except httpx.HTTPError as error:
            self.text = f"{type(error).__name__}: {error}"

    def wait(self, timeout: float) -> bool:
        """Whether it ended in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


def wait_for(condition: Callable[[], bool], timeout: float) -> bool:
    """Whether the condition came true in time."""
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def running(rig: LocalRig) -> int:
    """Rows of the scheduler."""
    return len(rig.memory.snapshot().running)


@dataclass(frozen=True)
class LivenessChecker:
    """Runs one check."""

    name: str
    functions: frozenset[str]
    clauses: Mapping[str, frozenset[str]]
    check: Callable[[Product, random.Random], Wrong]
    where: frozenset[str] = frozenset({"python"})
    seconds: float = 120.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """What `check` found wrong."""
        wrong = self.check(product, random.Random(f"{self.name}-{seed}"))
        return None if wrong is None else found(self, *wrong)


STANDING = {
    "an engine that stands still is told": frozenset("X"),
    "an engine that comes back is used again": frozenset("X"),
    "a slow reader loses nothing": frozenset("R"),
    "a lease is kept": frozenset("X"),
}


def check_standing(product: Product, rng: random.Random) -> Wrong:
    """The engine stands still beyond its limit; the front end stands still for a while; a request outlives leases."""
    told, back = list(STANDING)[:2]
    with rig_of(product, heartbeat_limit_s=1.0, lease_us=200_000) as rig:
        url = rig.base_url
        until, free = time.monotonic() + 0.8, None
        while free is None or time.monotonic() < until:  # a request on a quick machine is over within one lease
            free = httpx.post(f"{url}/v1/completions", json=BODY | {"max_tokens": LONG}, timeout=30)
            if free.status_code != 200:
                return "a lease is kept", f"{LONG} tokens with a lease of 0.2 s: {free.status_code} {free.text[:150]}"
        if (count := free.json()["usage"]["completion_tokens"]) != LONG:
            return "a slow reader loses nothing", f"{count} tokens of {LONG} arrived"
        slow = Pending(url, BODY | {"max_tokens": LONG}, 20)
        wait_for(lambda: running(rig) > 0, 5.0)
        for _ in range(3):
            rig.send("frontend", signal.SIGSTOP)
            time.sleep(0.05 + 0.05 * rng.random())  # shorter than the lease: events pile up
            rig.send("frontend", signal.SIGCONT)
            time.sleep(0.02)
        if not slow.wait(20.0) or slow.status != 200:
            return "a slow reader loses nothing", f"status {slow.status}: {slow.text[:150]}"
        mine, theirs = (
            (r["choices"][0]["text"], r["usage"]["completion_tokens"]) for r in map(_json, (slow.text, free.text))
        )
        if mine != theirs:
            return (
                "a slow reader loses nothing",
                f"{mine[1]} tokens {mine[0][:60]!r}, at once {theirs[1]} {theirs[0][:60]!r}",
            )
        waiting = Pending(url, BODY | {"max_tokens": LONG}, 20)
        wait_for(lambda: running(rig) > 0, 5.0)
        rig.send("engine", signal.SIGSTOP)
        if not waiting.wait(6.0) or waiting.status not in (200, 503):
            return told, f"6 s after an engine stood still for a limit of 1 s: {waiting.status} {waiting.text[:100]}"
        if not wait_for(lambda: httpx.get(f"{url}/health", timeout=5).status_code == 503, 4.0):
            return told, "its health is not 503"
        rig.send("engine", signal.SIGCONT)
        again = {"status": 0}

        def answered() -> bool:
            with suppress(httpx.HTTPError):
                again["status"] = httpx.post(
                    f"{url}/v1/completions", json=BODY | {"max_tokens": 2}, timeout=5
                ).status_code
            return again["status"] == 200

        if not wait_for(answered, 8.0):
            return back, f"8 s after the engine went on: {again['status']}"
    return None


def _json(text: str) -> Any:
    import json

    return json.loads(text)


GONE = {
    "an engine that is gone is told": frozenset("X"),
    "a request's own timeout": frozenset("X"),
    "an abandoned request ends": frozenset("R"),
}


def check_gone(product: Product, rng: random.Random) -> Wrong:
    """A request beyond its own timeout, a client that leaves, and an engine that is killed under a request."""
    gone = "an engine that is gone is told"
    with rig_of(product, heartbeat_limit_s=60.0) as rig:
        url = rig.base_url
        late = Pending(url, BODY | {"max_tokens": LONG, "timeout": 0.02}, 20)
        if not late.wait(15.0) or late.status != 504:
            return "a request's own timeout", f"a timeout of 20 ms for {LONG} tokens: {late.status} {late.text[:100]}"
        # One by one: a request of this engine is over in a second anyway, so several are abandoned at once.
        with httpx.Client(base_url=url, timeout=10) as client:
            streams = []
            for _ in range(8):
                asked = client.build_request(
                    "POST", "/v1/completions", json=BODY | {"max_tokens": LONG, "stream": True}
                )
                streams.append(client.send(asked, stream=True))
            before = rig.memory.status("steps")
            for stream in streams:
                stream.close()
        if not wait_for(lambda: running(rig) == 0, 10.0):
            return "an abandoned request ends", "rows run 10 s after their clients left"
        steps = rig.memory.status("steps") - before
        if steps > 0.6 * LONG:
            return "an abandoned request ends", f"{steps} more steps after 8 clients left requests of {LONG} tokens"
        waiting = Pending(url, BODY | {"max_tokens": LONG, "n": 2}, 20)
        wait_for(lambda: running(rig) > 0, 5.0)
        rig.send("engine", signal.SIGKILL)
        if not waiting.wait(8.0) or waiting.status not in (200, 503):
            return gone, f"8 s after its engine was killed: {waiting.status} {waiting.text[:100]}"
        if not wait_for(lambda: httpx.get(f"{url}/health", timeout=5).status_code == 503, 5.0):
            return gone, "its health is not 503"
    return None


_HERE = "verification.mutants.checkers.liveness."
CHECKERS: tuple[Checker, ...] = (
    LivenessChecker("liveness-standing", frozenset({_HERE + "check_standing"}), STANDING, check_standing),
    LivenessChecker("liveness-gone", frozenset({_HERE + "check_gone"}), GONE, check_gone),
)
