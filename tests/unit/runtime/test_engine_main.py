"""The engine process on the host, where no engine runs: how it ends when its launcher is gone."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blink_core.runtime import engine_main
from blink_core.runtime.parent import EXIT_ORPHANED
from blink_core.transport.interface import TransportError


class Ended(BaseException):
    """What `os._exit` would have done."""


@pytest.mark.parametrize("error", [None, TransportError("the segment is gone"), OSError(28, "no space")])
def test_orphan_ends_whatever_becomes_of_its_segment(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: an engine without a launcher that lives on, wedged, because its segment could not be removed; an error
    there of which nobody is told."""
    asked: list[str] = []

    def close() -> None:
        asked.append("close")
        if error is not None:
            raise error

    def leave(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(engine_main, "ORPHAN_GRACE_S", 0.0)
    monkeypatch.setattr(os, "_exit", leave)
    runtime = SimpleNamespace(request_stop=lambda: asked.append("stop"), segment=SimpleNamespace(close=close))
    with caplog.at_level(logging.ERROR), pytest.raises(Ended) as ended:
        engine_main.stop_orphan(cast(Any, runtime))
    assert ended.value.args == (EXIT_ORPHANED,)
    assert asked == ["stop", "close"]
    told = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert told == ([] if error is None else [str(error)])
