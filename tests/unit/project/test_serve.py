"""`blink serve`: what it refuses, and how it stops."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
from collections.abc import Callable
from typing import cast

import pytest
import typer
from typer.testing import CliRunner

from hil_rigs.local import LocalRig, RigFailure
from hil_rigs.serve import RESTARTS, example_request, serve, stop_signals, wait_until_over

app = typer.Typer()
app.command()(serve)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no-such-model"], "known models: SmolLM2-135M-Instruct"),
        (["--model", "SmolLM2-135M-Instruct", "--rig", "nope"], "known rigs: gpu, local"),
        (["--model", "SmolLM2-135M-Instruct", "--port", "70000"], "65535"),
    ],
)
def test_refusals(arguments: list[str], words: str) -> None:
    """Catches: a wrong argument found only after the engine started, or an exit code of 0."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_example_request_is_a_valid_command() -> None:
    """Catches: an example that a shell or the server cannot read."""
    words = shlex.split(example_request("http://127.0.0.1:8000", "It's a model").replace("\\\n", ""))
    assert words[0] == "curl"
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "It's a model"


class Rig:
    """A rig that reports deaths: `wait` gives one after the other, `engine` tells whether it was the engine."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, reasons: list[str | None], engine: bool = False, failure: str | None = None) -> None:
        self.reasons, self.engine, self.failure, self.restarted = reasons, engine, failure, 0

    def wait(self, timeout: float) -> str | None:
        return self.reasons.pop(0)

    def exited(self, process: str) -> str | None:
        return "engine process died" if process == "engine" and self.engine else None

    def restart(self, process: str, cancelled: Callable[[], bool]) -> None:
        self.restarted += 1
        if self.failure is not None:
            raise RigFailure(self.failure)


def test_death_of_the_engine_ends_the_wait() -> None:
    """Catches: a server that stays up, answering 503, after its engine died."""
    rig = Rig([None, "engine process died"], engine=True)
    assert wait_until_over(cast(LocalRig, rig), threading.Event()) == "engine process died"
    assert rig.restarted == 0


def test_a_dead_front_end_is_started_again_but_not_for_ever() -> None:
    """Catches: a front end that dies at once and is started again without end, its reason never shown."""
    rig = Rig(["frontend died"] * (RESTARTS + 1))
    reason = wait_until_over(cast(LocalRig, rig), threading.Event())
    assert reason is not None
    assert reason.startswith("frontend died")
    assert rig.restarted == RESTARTS


def test_a_front_end_that_does_not_come_back_ends_the_wait() -> None:
    """Catches: a failed restart that leaves `serve` waiting beside an engine nobody can reach."""
    rig = Rig(["frontend died"], failure="frontend was not ready in time")
    assert wait_until_over(cast(LocalRig, rig), threading.Event()) == "frontend was not ready in time"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_and_are_restored(number: signal.Signals) -> None:
    """Catches: SIGTERM that kills without stopping the rig's processes; handlers left behind."""
    before = signal.getsignal(number)
    with stop_signals() as stopped:
        os.kill(os.getpid(), number)
        assert stopped.wait(10)
        assert wait_until_over(cast(LocalRig, Rig([])), stopped) is None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) is before
