"""What a run of a user's own tests is judged by, and tests whose markers are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verification.certificate.verify import verify

Suite = Callable[..., Any]

OWN = """
import pytest
@pytest.mark.blink_property("streaming")
def test_mine(): pass
@pytest.mark.capability("cpu")
def test_other(): pass
"""


def test_own_tests_are_judged_by_themselves(suite: Suite) -> None:
    """Catches: pytest that ends with 0 while its report says `could not run`, for tests that nobody asked for."""
    done = suite(OWN, "--rig", "local", "--out", "out")
    assert done.code == 0
    assert done.report["verdict"] == {"word": "passed", "exit_code": 0, "certified": False, "reasons": []}
    assert done.report["run"]["judged"] == "selection"
    assert done.report["kind"] == "report"
    assert "required set was not judged" in done.report["claim"]["standing"]
    assert {test["id"] for test in done.report["tests"]} == {"streaming/mine", "mini/other"}
    assert verify(done.out).problems == ()


def test_tests_left_out_on_request_are_no_holes(suite: Suite) -> None:
    """Catches: a property called missing because `-k` chose one of its tests; a report that hides what was not run."""
    more = OWN + '@pytest.mark.blink_property("streaming")\ndef test_another(): pass\n'
    done = suite(more, "--rig", "local", "--out", "out", "-k", "mine")
    assert [(p["name"], p["outcome"], p["tests"]) for p in done.report["properties"]] == [("streaming", "passed", 1)]
    assert {entry["id"] for entry in done.report["not_run"]} == {"streaming/another", "mini/other"}


def test_required_set_is_judged_when_asked(suite: Suite) -> None:
    """Catches: `--blink-required` that asks for nothing."""
    done = suite(OWN, "--rig", "local", "--out", "out", "--blink-required")
    assert done.report["verdict"]["exit_code"] == 2
    assert done.report["run"]["judged"] == "required-set"
    assert any("is missing" in reason for reason in done.report["verdict"]["reasons"])


def test_a_selection_is_never_a_certificate(suite: Suite) -> None:
    """Catches: one passed test of profile full that is called a certificate; a run of nothing that passed."""
    done = suite(OWN, "--rig", "local", "--profile", "full", "--out", "out")
    assert (done.report["kind"], done.report["verdict"]["certified"]) == ("report", False)
    done = suite("import pytest\ndef test_a(): pytest.skip('no')\n", "--rig", "local", "--out", "out")
    assert done.report["verdict"]["reasons"] == ["no test passed"]


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("capability('share-memory')", "unknown capability 'share-memory', did you mean 'shared-memory'?; known: cpu,"),
        ("blink_profile('nightl')", "unknown blink profile 'nightl', did you mean 'nightly'?; known: smoke,"),
    ],
)
def test_unknown_name_in_a_marker_fails_its_test_only(suite: Suite, mark: str, message: str) -> None:
    """Catches: a misspelt marker that ends the whole session, or that filters its test on every rig."""
    done = suite(f"{OWN}@pytest.mark.{mark}\ndef test_misspelt(): pass\n", "--rig", "local", "--out", "out")
    assert message in done.text
    assert done.outcome("mini/misspelt") == "test_defect"
    assert done.outcome("streaming/mine") == "passed"
    assert done.code == 1


def test_unregistered_marker_is_refused_and_ours_are_registered(suite: Suite) -> None:
    """Catches: markers of the plugin that `--strict-markers` (pytest.ini of the test suite here) does not know, also
    where the plugin is not in use; help that says something else than what happens."""
    assert suite(OWN, "--rig", "local").code == 0
    assert suite(OWN).code == 0
    typo = suite(OWN.replace("mark.capability", "mark.capabilty"), "--rig", "local")
    assert typo.code == 2
    assert "'capabilty' not found in `markers`" in typo.text
    text = " ".join(suite(OWN, "--rig", "local", "--markers").text.split())
    assert "on a rig without it the test is filtered. A name that Blink does not know is a defect of that test" in text


def test_fixtures_are_documented(suite: Suite) -> None:
    """Catches: a public fixture that `pytest --fixtures` does not show, or shows without a word."""
    text = suite(OWN, "--rig", "local", "--fixtures").text
    for name in ("rig", "engine", "client", "history", "fault", "record", "seed", "judge", "tiny", "blink_run"):
        _, found, rest = text.partition(f"\n{name} ")
        assert found, name
        assert rest.partition("\n")[2].startswith("    "), name
        assert not rest.partition("\n")[2].lstrip().startswith("no docstring"), name


def test_rig_file_is_used_from_anywhere(suite: Suite, tmp_path: Any) -> None:
    """Catches: a description that is only found in Blink's own folder; a rig that is not the one that was named."""
    from hil_rigs.description import RIGS_DIR

    text = (RIGS_DIR / "local.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("name: local", "name: mine").replace(", oracle]", "]"))
    tests = OWN + '\n@pytest.mark.capability("oracle")\ndef test_oracle(): pass\n'
    tests += "def test_rig(blink_run): assert blink_run.rig.endswith('mine.yaml')\n"
    done = suite(tests, "--rig-file", str(tmp_path / "mine.yaml"), "--out", "out", "--seed", "5")
    assert done.outcome("mini/oracle") == "filtered"
    assert done.outcome("mini/rig") == "passed"
    assert done.report["run"]["seed"] == 5
