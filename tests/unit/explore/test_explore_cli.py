"""`blink explore`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from verification.explore.cli import explore_app


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(explore_app, list(arguments))
    return done.exit_code, done.output


def test_list_names_every_scope() -> None:
    """Catches: a scope that nobody can run by name."""
    code, text = run("list")
    assert code == 0
    assert "epoch-change-in-step" in text
    code, text = run("list", "--json")
    assert code == 0
    assert {"name", "profiles", "about"} == set(json.loads(text)[0])


def test_run_prints_what_was_searched() -> None:
    """Catches: a search whose states, depth or probability of omission nobody sees; an exit code that says nothing."""
    code, text = run("run", "stop")
    assert code == 0
    for words in ("frontier empty", "states", "depth", "omission probability", "symmetry off: valid", "occurred: "):
        assert words in text
    code, text = run("run", "stop", "--symmetry", "on", "--json")
    assert code == 0
    assert json.loads(text)[0]["verdict"] == "valid"


def test_run_shows_a_counterexample_and_fails() -> None:
    """Catches: a broken clause that ends with exit 0; a counterexample that is not shown."""
    code, text = run("run", "stop", "--plant", "freed-in-step", "--symmetry", "on")
    assert code == 1
    assert "clause K4" in text
    assert "scheduler polls" in text
    assert run("run", "epoch-change-in-step", "--max-states", "100")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "no scope 'nothing'; there are"),
        (("--symmetry", "some"), "--symmetry some: one of on, off, both"),
        (("--plant", "x"), "--plant x: one of none, misstated"),
        (("--profile", "x"), "--profile x: one of smoke"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], words: str) -> None:
    """Catches: a traceback where a name was wrong."""
    code, text = run("run", *arguments)
    assert code == 2
    assert words in text
