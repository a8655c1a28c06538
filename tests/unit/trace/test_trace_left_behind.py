"""The suite's recorded traces hold prompts: none stays behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from verification.certificate.outcomes import PropertyViolation
from verification.properties import queue_ordering
from verification.result import CheckResult, Verdict
from verification.suite import test_conformance as suite


class Written:
    """A recorder that has written something."""

    def __init__(self, memory: object, path: Path, header: object) -> None:
        path.write_bytes(b"prompts")

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def settle(self) -> None: ...


@pytest.mark.parametrize("by", ["judge", "trace"])
def test_a_trace_is_gone_whatever_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str) -> None:
    """Catches: a trace, prompts and all, that stays in the run's folder when a history is judged bad, or when the trace
    itself cannot be read."""
    result = CheckResult(Verdict.INVALID, queue_ordering.PROPERTY, "fifo", "planted")
    subject = SimpleNamespace(
        rig=SimpleNamespace(memory=SimpleNamespace(config=None), description=SimpleNamespace(name="local")),
        run=lambda program: None,
        eos_ids=(),
        max_len=9,
    )

    class FakeJudge:
        def case(self, program: object) -> None: ...

        def __call__(self, *judged: object) -> None:
            if by == "judge":
                raise PropertyViolation(result)

    monkeypatch.setattr(suite, "Recorder", Written)
    monkeypatch.setattr(suite, "Header", lambda *a, **k: None)
    monkeypatch.setattr(queue_ordering, "check_history", lambda *a, **k: result)
    wanted: type[Exception] = PropertyViolation if by == "judge" else ValueError
    with pytest.raises(wanted):
        suite.record_and_check(
            cast(Any, subject), cast(Any, subject), [cast(Any, None)], cast(Any, FakeJudge()), tmp_path, "m"
        )
    assert list(tmp_path.iterdir()) == []
