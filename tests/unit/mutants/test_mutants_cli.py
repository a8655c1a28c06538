"""`blink mutants`: what it is asked for wrongly, or without what it needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verification.mutants import weave
from verification.mutants.cli import app
from verification.mutants.model import PRODUCT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "--where", "c++"), "--where c++: one of native, python, cuda"),
        (("run", "--where", "c++"), "--where c++: one of native, python, cuda"),
        (("run", "--where", "cuda"), "these run on a GPU only"),
        (("list", "--class", "Z"), "--class Z: the classes are Q, R, K"),
    ],
)
def test_wrong_choice_is_refused_with_what_there_is(arguments: tuple[str, ...], message: str) -> None:
    """Catches: a misspelt choice answered with an empty list and exit 0, or with nothing but that none is selected."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2
    assert message in done.output


def test_what_a_build_needs_is_told_with_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: after `make certify` alone, advice to fetch by name a package that no index has."""
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(weave.BuildFailed, match="`make install-dev`"):
        weave.build([], tmp_path)
    assert "\ninstall-dev:" in (PRODUCT / "Makefile").read_text(encoding="utf-8")
