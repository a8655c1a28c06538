"""What checkers of Python mutants make of an answer that does not come: a hang, which is neither crash nor finding."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from verification.mutants.checkers import http
from verification.mutants.checkers.base import Product
from verification.mutants.parts import Parts, PartsGone


def test_a_call_beyond_the_deadline_is_late() -> None:
    """Catches: parts that are slow, counted as if they had crashed; and those that end, as if they were slow."""
    with Parts(os.environ, time.monotonic() + 20.0) as parts:
        assert parts.call("operator:add", 1, 2) == 3  # it has started
        parts.deadline = time.monotonic() + 0.2
        with pytest.raises(TimeoutError, match="no answer to time:sleep in time"):
            parts.call("time:sleep", 30.0)
    with Parts(os.environ, time.monotonic() + 20.0) as parts, pytest.raises(PartsGone, match="status 7 in os:_exit"):
        parts.call("os:_exit", 7)


def test_an_http_answer_that_does_not_come_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a server that accepts and never answers, counted as a crash of the checker."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        parts = Mock(alive=False)
        parts.keep.return_value.call.return_value = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(http, "parts_of", lambda product, deadline: parts)
        monkeypatch.setattr(http, "model_path", lambda name: tmp_path)
        with (
            pytest.raises(TimeoutError, match="no answer in time"),
            http.serving(Product(None, {}, tmp_path), time.monotonic() + 0.2) as client,
        ):
            client.ask({"prompt": "a"})
