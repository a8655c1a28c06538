"""The pytest plugin at work in a pytest of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from verification.certificate import required
from verification.certificate.report import validate
from verification.certificate.verify import verify
from verification.run_context import DEFAULT_SEED, RunContext, parse_seed

ROOT = Path(__file__).resolve().parents[3]
Suite = Callable[..., Any]

EXPECTED = {
    "queue-ordering/fifo[1]": "passed",
    "queue-ordering/fifo[2]": "passed",
    "kv-conservation/leak": "product_failure",
    "kv-content/gap": "unknown",
    "streaming/drawn": "product_failure",
    "mini/rig_first": "infrastructure",
    "mini/rig_second": "blocked",
    "mini/port_first": "infrastructure",
    "mini/port_second": "blocked",
    "mini/defect": "test_defect",
    "mini/plain": "product_failure",
    "mini/teardown": "test_defect",
    "mini/gpu": "filtered",
    "mini/long": "filtered",
    "mini/skipped": "skipped",
    "mini/expected": "skipped",
    "mini/left_out": "missing",
}


def test_each_way_to_end_has_its_outcome(every_outcome: Any) -> None:
    """Catches: any of the nine outcomes mapped to another; a cause counted more than once."""
    report = every_outcome.report
    validate(report)
    found = {test["id"]: test["outcome"] for test in report["tests"]}
    assert {test: outcome for test, outcome in found.items() if test in EXPECTED} == EXPECTED
    assert {outcome for test, outcome in found.items() if test not in EXPECTED} == {"missing"}  # required, absent here
    assert set(EXPECTED.values()) == {name for name, count in report["counts"].items() if count}
    assert report["verdict"]["exit_code"] == 1
    assert "token-equivalence: 0 tests passed, at least 1 required" in report["verdict"]["reasons"]
    assert "streaming: required test streaming/same_answer[chat-0] is missing" in report["verdict"]["reasons"]


def test_record_reaches_the_report(every_outcome: Any) -> None:
    """Catches: measurements, witness, clause, seed or replay command lost between the test and the report."""
    tests = {test["id"]: test for test in every_outcome.report["tests"]}
    leak = tests["kv-conservation/leak"]
    assert (leak["clause"], leak["witness"], leak["cases"]) == ("K1", {"page": 3}, 0)
    assert leak["measurements"]["leaked"] == {"value": 1.0, "unit": "pages", "limit": 0.0, "limit_is": "max", "n": 10}
    assert "test_mini.py::test_leak" in leak["replay"]
    assert f"--seed {DEFAULT_SEED}" in leak["replay"]
    assert tests["streaming/drawn"]["witness"] == {"n": 1000}  # shrunk to the least number that fails
    assert tests["queue-ordering/fifo[1]"]["series"][0]["name"] == "pages"
    assert tests["queue-ordering/fifo[1]"]["seed"] != tests["queue-ordering/fifo[2]"]["seed"]
    assert "mini/rig_first" in tests["mini/rig_second"]["message"]


def test_all_files_are_written_and_the_signature_holds(every_outcome: Any) -> None:
    """Catches: a file signed before its writer was done with it (JUnit, allure), or not at all."""
    names = {entry.name for entry in every_outcome.out.iterdir()}
    files = {"report.json", "report.html", "junit.xml", "required.yaml", "journal.jsonl", "attestation.dsse.json"}
    assert files | {"allure-results"} <= names
    result = verify(every_outcome.out)
    assert result.problems == ()
    assert result.verdict == "property failed"


def test_junit_carries_own_ids_and_outcomes(every_outcome: Any) -> None:
    """Catches: a JUnit file in which nobody can tell a broken rig from a broken product."""
    cases = {}
    for case in ElementTree.parse(every_outcome.out / "junit.xml").iter("testcase"):
        properties = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        cases[properties["blink_id"]] = properties["blink_outcome"]
    assert cases == {test: outcome for test, outcome in EXPECTED.items() if outcome != "missing"}


def test_allure_results_have_stable_ids_and_property_labels(every_outcome: Any) -> None:
    """Catches: allure results without the property, or with one history for two tests."""
    results = [json.loads(path.read_text()) for path in (every_outcome.out / "allure-results").glob("*-result.json")]
    labels = [{label["name"]: label["value"] for label in result["labels"]} for result in results]
    assert {entry["as_id"] for entry in labels} == {test for test, out in EXPECTED.items() if out != "missing"}
    assert len({result["historyId"] for result in results}) == len(results)
    leak = next(entry for entry in labels if entry["as_id"] == "kv-conservation/leak")
    assert (leak["feature"], leak["epic"]) == ("kv-conservation", "Blink on local")


def test_header_and_summary_say_what_ran(every_outcome: Any) -> None:
    """Catches: a run that prints neither its seed nor where its report is."""
    assert f"root seed {DEFAULT_SEED} (default" in every_outcome.text
    assert "rig local, profile smoke" in every_outcome.text
    assert "verdict: property failed" in every_outcome.text
    assert str(every_outcome.out / "report.html") in every_outcome.text


def test_xdist_gives_the_same_outcomes(suite: Suite, every_outcome: Any, every_outcome_text: str) -> None:
    """Catches: records lost between workers and controller; draws that depend on the worker."""
    left_out = ("--deselect", "test_mini.py::test_left_out")
    options = ("--rig", "local", "--blink-required", "--out", "out", "-n", "2", "--dist", "loadfile", *left_out)
    done = suite(every_outcome_text, *options)
    outcomes = {test["id"]: test["outcome"] for test in done.report["tests"]}
    assert outcomes == {test["id"]: test["outcome"] for test in every_outcome.report["tests"]}
    seeds = {test["id"]: test["seed"] for test in every_outcome.report["tests"]}
    assert {test["id"]: test["seed"] for test in done.report["tests"]} == seeds
    assert verify(done.out).valid


def test_xdist_worker_that_dies_is_infrastructure(suite: Suite) -> None:
    """Catches: a crash reported as a failure of the property, or a crashed test left out of the report."""
    text = """
import os, pytest
@pytest.mark.blink_property("streaming")
def test_crash(): os._exit(9)
@pytest.mark.blink_property("kv-content")
def test_fine(): pass
"""
    done = suite(text, "--rig", "local", "--out", "out", "-n", "1")
    assert done.outcome("streaming/crash") == "infrastructure"
    assert done.outcome("kv-content/fine") == "passed"
    assert done.report["verdict"]["exit_code"] == 2


def test_all_passed_gives_a_passed_verdict(suite: Suite, passing: str) -> None:
    """Catches: a plugin under which nothing can pass."""
    done = suite(passing, "--rig", "local", "--blink-required", "--out", "out")
    assert done.code == 0
    assert done.report["verdict"] == {"word": "passed", "exit_code": 0, "certified": False, "reasons": []}
    (entry,) = [p for p in done.report["properties"] if p["name"] == "streaming"]
    assert (entry["cases"], entry["failures"]) == (10 * entry["tests"], 0)
    assert 0 < entry["failure_rate_interval"][1] < 0.3085  # ten cases alone would give the latter


def test_not_run_after_first_failure_is_missing(suite: Suite, passing: str) -> None:
    """Catches: tests that `-x` never reached and that the report does not mention."""
    done = suite("def test_0(): assert False\n" + passing, "--rig", "local", "--out", "out", "-x")
    assert done.outcome("mini/0") == "product_failure"
    assert done.outcome("queue-ordering/model_under_test") == "missing"


def test_collection_error_is_a_test_defect(suite: Suite) -> None:
    """Catches: a suite that cannot be imported and leaves an empty, harmless-looking report."""
    done = suite("import no_such_module\n", "--rig", "local", "--out", "out")
    (test,) = [test for test in done.report["tests"] if test["outcome"] != "missing"]
    assert test["outcome"] == "test_defect"
    assert "no_such_module" in test["details"]
    assert done.report["verdict"]["exit_code"] == 2


def test_two_tests_with_one_id_are_refused(suite: Suite) -> None:
    """Catches: one test's result written over another's."""
    mark = '@pytest.mark.blink_property("streaming", id="x")\n'
    done = suite(f"import pytest\n{mark}def test_a(): pass\n{mark}def test_b(): pass\n", "--rig", "local")
    assert done.code == 4
    assert "same own id 'streaming/x'" in done.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rig", "moon"), "unknown rig 'moon'; known rigs: "),
        (("--rig", "local", "--profile", "lunch"), "no profile 'lunch'"),
        (("--rig", "local", "--seed", "soon"), "seed 'soon' is neither a number nor 'random'"),
        (("--rig", "local", "--out", "."), "holds files that are not of a Blink run"),
        (("--rig", "local", "--rig-file", "mine.yaml"), "--rig local and --rig-file mine.yaml: name one rig"),
        (("--rig-file", "mine.json"), "the file of a rig ends in .yaml or .yml"),
        (("--rig-file", "absent.yaml"), "cannot read the rig description"),
    ],
)
def test_bad_options_are_usage_errors(suite: Suite, passing: str, arguments: tuple[str, ...], message: str) -> None:
    """Catches: a misspelt option found out in the middle of a run, or after it."""
    done = suite(passing, *arguments)
    assert done.code == 4
    assert message in done.text


def test_plugin_is_harmless_when_not_used(suite: Suite, tmp_path: Path) -> None:
    """Catches: fixtures, options, reports or slow imports forced on projects that only have Blink installed."""
    text = """
import sys
import pytest
def test_nothing_heavy_is_loaded():
    assert not {"torch", "matplotlib", "pydantic", "numpy", "jinja2", "cryptography", "scipy"} & set(sys.modules)
@pytest.fixture
def client(): return 5
def test_own_fixture_wins(client): assert client == 5
def test_fixture_is_absent(record): pass
"""
    (folder := tmp_path / "suite").mkdir()
    options = "".join(
        f"    parser.addoption('--{name}', default='theirs')\n" for name in ("model", "seed", "out", "rig")
    )
    (folder / "conftest.py").write_text(f"def pytest_addoption(parser):\n{options}", encoding="utf-8")
    done = suite(text, "--seed", "mine", fresh=True)
    assert "2 passed" in done.text
    assert "1 error" in done.text
    assert "fixture 'record' not found" in done.text
    assert "blink:" not in done.text
    assert not done.out.exists()


def test_option_taken_by_another_plugin_keeps_its_long_name(suite: Suite, tmp_path: Path) -> None:
    """Catches: pytest that no longer starts because another plugin has a --profile of its own."""
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "profiler.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--profile', default='theirs')\n"
    )
    text = """
def test_both(request, blink_run):
    assert request.config.getoption("--profile") == "theirs"
    assert blink_run.profile_name == "full"
"""
    done = suite(text, "--rig", "local", "--blink-profile", "full", before=("-p", "profiler"))
    assert "1 passed" in done.text


def test_seed_reproduces_draws_and_random_prints_its_seed(suite: Suite) -> None:
    """Catches: a failure that its printed seed does not bring back; a `--seed` that hypothesis ignores."""
    text = """
from hypothesis import given, strategies as st
drawn = []
@given(st.integers(0, 2**60))
def test_draw(n): drawn.append(n)
def test_show(seed): print("\\ndrawn", hash(tuple(drawn)), seed)
"""
    lines: list[tuple[str, str]] = []
    for arguments in (("--seed", "random"), ("--seed", "{}"), ("--seed", "12345"), ()):
        given = [argument.format(lines[0][0] if lines else "") for argument in arguments]
        done = suite(text, "--rig", "local", "-s", *given)
        root = done.text.partition("root seed ")[2].split()[0]
        lines.append((root, next(line for line in done.text.splitlines() if line.startswith("drawn"))))
    assert lines[0] == lines[1]
    assert len({line for _, line in lines}) == 3
    assert lines[3][0] == str(DEFAULT_SEED)


def test_two_runs_into_one_folder_exclude_each_other(suite: Suite, passing: str, tmp_path: Path) -> None:
    """Catches: two runs that write one report together."""
    from hil_rigs.locks import OwnedLock
    from verification.certificate.output import lock_name

    out = tmp_path / "suite" / "out"
    with OwnedLock(lock_name(out), owner="first-run", directory=tmp_path / "suite" / "home" / "locks"):
        done = suite(passing, "--rig", "local", "--out", "out")
    assert done.code == 4
    assert "in use by first-run" in done.text


def test_derived_seeds_are_fixed_for_ever() -> None:
    """Catches: a change of the derivation, which would make old seeds draw other programs."""
    context = RunContext("r", "local", "smoke", None, 1, "given", None)
    assert context.derive_seed("a", 2) == 1_842_670_679_427_078_406
    assert context.derive_seed("a", 2) != context.derive_seed("a", 3)
    assert context.derive_seed("a", bits=8) < 256
    assert parse_seed("0x10") == (16, "given")
    with pytest.raises(ValueError, match="outside"):
        parse_seed("-1")


def test_help_of_the_command_is_quick_to_import() -> None:
    """Catches: `blink --help` that loads torch, pydantic, matplotlib or a model."""
    code = (
        "import sys; from verification.cli import mount; mount(None)\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pydantic', 'numpy', 'scipy', 'cryptography', 'pytest'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("profile", ["smoke", "nightly", "full"])
def test_required_ids_are_those_of_the_suite(fork_server: Any, tmp_path: Path, profile: str) -> None:
    """Catches: a test of the suite that nobody requires, or a required one that was renamed or removed; a family that a
    profile leaves out. What is filtered in a profile cannot be required: tests of others, and of pages shared where
    LongRoPE computes keys anew or batches mix its frequencies."""
    helper = """
def pytest_collection_finish(session):
    from verification.certificate.identity import own_id, property_of
    lines = []
    for item in session.items:
        profiles = [name for mark in item.iter_markers("blink_profile") for name in mark.args]
        if not profiles or PROFILE in profiles:
            lines.append(f"{property_of(item)} {own_id(item)}")
    open("ids.txt", "w").write("\\n".join(lines))
"""
    (tmp_path / "listing.py").write_text(helper.replace("PROFILE", repr(profile)), encoding="utf-8")
    suite = str(ROOT / "verification" / "suite")
    arguments = ["-p", "listing", "--rig", "local", "--profile", profile, "--collect-only", "--rootdir", str(ROOT)]
    arguments += ["-c", str(ROOT / "verification" / "suite.ini")]
    code, text = fork_server.run(tmp_path, [*arguments, suite])
    assert code == 0, text
    found: dict[str, set[str]] = {}
    for line in (tmp_path / "ids.txt").read_text(encoding="utf-8").splitlines():
        name, _, test = line.partition(" ")
        found.setdefault(name, set()).add(test)
    sharing = (
        "kv-content/shared_pages[",
        "token-equivalence/prefix_cache_on_and_off[",
        "token-equivalence/paged_oracle[",
    )
    optional = "cross-rig-agreement/other_rig"  # needs --agree-with
    for name, tests in found.items():
        found[name] = {t for t in tests if not (t.startswith(sharing) and "longrope" in t) and t != optional}
    wanted = required.load("local").profile(profile).properties
    assert {name: set(entry.tests) for name, entry in wanted.items()} == found
    assert "token-equivalence/tiny_models[phi3-longrope]" in found["token-equivalence"]


HOST_ALONE = {"specification", "small-scopes", "ring-model", "mutants"}


@pytest.mark.parametrize("profile", ["smoke", "nightly", "full"])
def test_the_gpu_requires_what_applies_there(profile: str) -> None:
    """Catches: a test that was added on rig local, and whose property the GPU must keep too, required there by nobody;
    one that was renamed. What is the host's alone is not, and smoke leaves the fault corpus to the nights."""
    left_out = HOST_ALONE | ({"scenarios"} if profile == "smoke" else set())
    local, gpu = (required.load(rig).profile(profile).properties for rig in ("local", "gpu"))
    expected = {name: set(entry.tests) for name, entry in local.items() if name not in left_out}
    assert {name: set(entry.tests) for name, entry in gpu.items()} == expected
