"""Rig descriptions, limits, probing, and `blink rig`."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import verification
from blink_core.abi.config import EngineConfig, fit_shared_memory
from blink_core.runtime import engine_main
from hil_rigs.capabilities import CAPABILITIES, PROPERTY_NEEDS
from hil_rigs.cli import rig_app
from hil_rigs.description import RIGS_DIR, RigError, known_rigs, load_rig
from hil_rigs.limits import SHM_MINIMUM_BYTES, SHM_SHARE
from hil_rigs.probe import PROBES, probe_cpu, probe_rig, probe_shared_memory

LOCAL: dict[str, Any] = yaml.safe_load((RIGS_DIR / "local.yaml").read_text())


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**LOCAL, **changes}))
    return path


def engine(**changes: Any) -> dict[str, Any]:
    return {**LOCAL["engine"], **changes}


def test_shipped_rigs_hold() -> None:
    """Catches: a shipped description that no longer loads, or a capability that nothing can probe."""
    assert known_rigs() == ("gpu", "local")
    for name in known_rigs():
        rig = load_rig(name)
        assert set(rig.capabilities) <= set(PROBES) == set(CAPABILITIES)


def test_unknown_rig_lists_known() -> None:
    """Catches: `--rig lokal` answered with a missing file."""
    with pytest.raises(RigError, match=r"unknown rig 'lokal'; known rigs: gpu, local"):
        load_rig("lokal")
    with pytest.raises(RigError, match="unknown rig"):
        load_rig("../rigs/local")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": engine(slots=4097)}, ("engine.slots", "4097", "4096")),
        ({"engine": engine(slots=0)}, ("engine.slots", "0")),
        ({"engine": engine(slots="256")}, ("engine.slots", "'256'")),
        ({"engine": engine(pages=7)}, ("engine.pages", "7", "8")),
        ({"engine": engine(page_size=24)}, ("page_size is 24", "power of two")),
        ({"engine": engine(token_budget=8)}, ("token_budget is 8", "max_running 32")),
        ({"engine": engine(prefix_cache=1)}, ("engine.prefix_cache", "1")),
        ({"engine": engine(admission="eager")}, ("engine.admission", "'eager'")),
        ({"engine": engine(quantum=0)}, ("engine.quantum", "0")),
        ({"engine": engine(reservation_steps=0)}, ("engine.reservation_steps", "0")),
        ({"engine": engine(lease_us=-1)}, ("engine.lease_us", "-1")),
        ({"engine": engine(masks=257)}, ("masks is 257", "256 slots")),
        ({"engine": engine(slots=15)}, ("max_running is 32", "30 slots")),
        ({"engine": engine(colour="red")}, ("engine.colour", "unknown key; known: rings, slots")),
        ({"engine": engine(page=3)}, ("engine.page", "unknown key, did you mean 'pages'?")),
        ({"capabilites": ["cpu"]}, ("capabilites", "did you mean 'capabilities'?")),
        ({"kind": "tpu"}, ("kind", "'tpu'")),
        ({"capabilities": ["cpu", "warp-drive"]}, ("unknown capabilities warp-drive", "oracle")),
        ({"capabilities": ["cpu", "cpu"]}, ("listed twice",)),
        ({"capabilities": []}, ("capabilities",)),
        ({"name": "Local Rig"}, ("name", "Local Rig")),
    ],
)
def test_bad_field_is_named(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """Catches: a wrong number in a description that reaches the engine, or an error without field and value."""
    with pytest.raises(RigError) as caught:
        load_rig(write(tmp_path, **changes))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [("[1, 2]", "list, not a mapping"), ("a: [", "not valid YAML"), ("", "NoneType"), (b"\xff", "YAML")],
)
def test_bad_file(tmp_path: Path, content: str | bytes, words: str) -> None:
    """Catches: a broken file ending in a traceback of the YAML library."""
    path = tmp_path / "rig.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RigError, match=words):
        load_rig(path)
    with pytest.raises(RigError, match="No such file"):
        load_rig(tmp_path / "absent.yaml")


def test_wrong_lines_are_named(tmp_path: Path) -> None:
    """Catches: an error that leaves the reader to search a long file; a key that stands twice, of which one is lost."""
    path = tmp_path / "rig.yaml"
    text = (RIGS_DIR / "local.yaml").read_text()
    wanted = text.splitlines().index(next(line for line in text.splitlines() if "token_budget" in line)) + 1
    path.write_text(text.replace("token_budget:", "tokenbudget:"))
    with pytest.raises(RigError, match=rf"line {wanted}: engine.tokenbudget: unknown key, did you mean 'token_budget'"):
        load_rig(path)
    path.write_text(text + "name: other\n")
    with pytest.raises(RigError, match=r"line \d+: name: the key stands in line 3 already"):
        load_rig(path)


def test_init_writes_a_description_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a new rig that differs from the shipped one it was made from; a field without a word about it; a file
    that is overwritten."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(rig_app, ["init", "my-rig"])
    assert (done.exit_code, done.stdout) == (0, "my-rig.yaml\n")
    rig = load_rig(tmp_path / "my-rig.yaml")
    assert rig == load_rig("local").model_copy(update={"name": "my-rig"})
    lines = (tmp_path / "my-rig.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r" *[a-z_]+:", line):
            assert lines[number - 1].lstrip().startswith("#"), line
    again = CliRunner().invoke(rig_app, ["init", "my-rig"])
    assert (again.exit_code, "is there already" in again.output) == (2, True)
    assert (tmp_path / "my-rig.yaml").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("My Rig", "--out", "a.yaml"), "name: String should match pattern"),
        (("local",), "one that Blink ships"),
        (("mine", "--out", "mine.json"), "ends in .yaml"),
        (("mine", "--out", "absent/mine.yaml"), "cannot write"),
    ],
)
def test_init_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str) -> None:
    """Catches: a name that no later command takes, written all the same; a traceback."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(rig_app, ["init", *arguments])
    assert done.exit_code == 2
    assert words in done.output
    assert list(tmp_path.iterdir()) == []


def test_schema_agrees_with_the_model(tmp_path: Path) -> None:
    """Catches: a published schema that refuses what Blink takes, or takes a misspelt key, size or capability."""
    import jsonschema

    schema = json.loads(CliRunner().invoke(rig_app, ["schema"]).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert list(validator.iter_errors(LOCAL)) == []
    for wrong in (
        {"colour": "red"},
        {"engine": engine(slots=4097)},
        {"engine": engine(page=3)},
        {"capabilities": ["warp-drive"]},
        {"name": "Local Rig"},
    ):
        assert list(validator.iter_errors({**LOCAL, **wrong})), wrong
        with pytest.raises(RigError):
            load_rig(write(tmp_path, **wrong))
    described = [*schema["properties"].values(), *schema["$defs"]["EngineSettings"]["properties"].values()]
    assert all(entry.get("description") for entry in described)


def test_limits_agree_with_the_engine() -> None:
    """Catches: the doctor or the probe passing a machine on which the engine then cannot place its rings."""
    settings = load_rig("local").engine
    config = EngineConfig(
        vocab=49152,
        rings=settings.rings,
        slots=settings.slots,
        page_size=settings.page_size,
        pages=settings.pages,
        max_rows=settings.max_running,
        token_budget=settings.token_budget,
        max_len=settings.max_model_len,
    )
    assert engine_main.SHM_SHARE == SHM_SHARE
    assert fit_shared_memory(config, int(SHM_MINIMUM_BYTES * SHM_SHARE)) == config


def test_probe_says_which_properties_cannot_run() -> None:
    """Catches: a missing capability that leaves a property looking runnable."""
    there = {name: (lambda: (True, "there")) for name in CAPABILITIES}
    report = probe_rig(load_rig("local"), {**there, "oracle": lambda: (False, "not installed: torch")})
    assert not report.ready
    blocked = {item.name: item.missing for item in report.properties if not item.runnable}
    names = ("kv-content", "kv-sanitizer", "token-equivalence", "scenarios")
    assert blocked == dict.fromkeys(names, ("oracle",))
    assert probe_rig(load_rig("local"), there).ready


def test_probes_find_what_is_missing(tmp_path: Path) -> None:
    """Catches: a probe that cannot fail."""
    assert probe_shared_memory(str(tmp_path / "absent"))[0] is False
    assert probe_shared_memory(str(tmp_path), minimum=1 << 60)[0] is False
    assert probe_shared_memory(str(tmp_path), minimum=1)[0] is True
    available, detail = probe_cpu(module="blink_core.no_such_module")
    assert not available
    assert "no_such_module" in detail


def test_each_suite_property_has_its_needs() -> None:
    """Catches: a property added to the suite that `rig probe` does not know, or one listed that no test carries."""
    suite = Path(verification.__file__).parent / "suite"
    marked = set()
    for path in suite.glob("test_*.py"):
        module = import_module(f"verification.suite.{path.stem}")
        for thing in (module, *vars(module).values()):
            marks = getattr(thing, "pytestmark", ())
            marked |= {mark.args[0] for mark in marks if getattr(mark, "name", "") == "blink_property"}
    assert marked == set(PROPERTY_NEEDS)


def test_rig_commands() -> None:
    """Catches: an exit code or JSON that a script cannot use; an unknown rig without the known ones."""
    listed = CliRunner().invoke(rig_app, ["list", "--json"])
    assert [rig["name"] for rig in json.loads(listed.stdout)] == ["gpu", "local"]
    unknown = CliRunner().invoke(rig_app, ["probe", "nope"])
    assert unknown.exit_code == 2
    assert "known rigs: gpu, local" in unknown.output
    probed = CliRunner().invoke(rig_app, ["probe", "local", "--json"])
    document = json.loads(probed.stdout)
    assert probed.exit_code == (0 if document["ready"] else 1)
    assert {item["name"] for item in document["capabilities"]} == set(load_rig("local").capabilities)
    assert document["machine"]["cpus"] >= 1
    shown = CliRunner().invoke(rig_app, ["probe", "local"])
    assert shown.exit_code == probed.exit_code
    assert "shared-memory" in shown.output
