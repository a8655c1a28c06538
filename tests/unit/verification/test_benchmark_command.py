"""The command line that benchmarks of a model share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verification.benchmarks import decode, kv_sanitizer
from verification.benchmarks.results import Result, command


def measured(model: Path) -> list[Result]:
    return [Result(f"step of {model.name}", 1.25, "ms", "< 2", (1.0, 1.25, 1.5)), Result("ratio", 0.5, "x")]


def test_lines_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a quantity that is left out, or printed without its unit, limit or number of samples."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    command("about", measured, ["--model", str(tmp_path)])
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["step", "of", tmp_path.name, "1.250", "ms", "<", "2", "n=3"]
    assert second.split() == ["ratio", "0.500", "x"]
    command("about", measured, ["--model", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["samples"] == [1.0, 1.25, 1.5]


def test_benchmarks_have_one_command() -> None:
    """Catches: a benchmark that prints by a command of its own again."""
    for module in (decode, kv_sanitizer):
        assert module.command is command
        assert not hasattr(module, "main")
