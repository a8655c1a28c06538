"""`blink certify` against engines with one thing wrong: it must exit 1 and name the property (issue: done when)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hil_rigs.description import RIGS_DIR
from tests.planted.engine import MUTANT
from verification.mutants import weave

ENGINE = Path(__file__).parents[1] / "planted" / "engine.py"

FAULTS = {
    "admit-youngest-first": ("native-mutant", {"queue-ordering", "conformance"}),
    # Which row is foreign depends on the sizes of the engine, and with it the tokens: runs then disagree as well.
    "foreign-kv-row": ("foreign-kv-row", {"kv-content", "token-equivalence", "cross-rig-agreement"}),
    "rotary-position": ("rotary-position", {"kv-content", "token-equivalence"}),
}


def certify(rig: Path | str, model: Path, out: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verification.cli", "certify", "--rig", str(rig), "--model", str(model)]
    command += ["--profile", "smoke", "--out", str(out), "--fail-fast"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | environment, check=False
    )


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_planted_fault_is_named(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """Catches: a suite that passes a broken engine, or blames the wrong property."""
    fault, properties = FAULTS[name]
    description = yaml.safe_load((RIGS_DIR / "local.yaml").read_text())
    description |= {"name": "planted", "engine_command": [str(ENGINE), fault]}
    rig = tmp_path / "planted.yaml"
    rig.write_text(yaml.safe_dump(description))
    environment = {}
    if fault == "native-mutant":
        weave.build()  # here, so that the engine's start does not wait for it
        environment = {MUTANT: "admit-youngest-first"}
    done = certify(rig, tiny_model, tmp_path / "out", environment)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    failed = {p["name"] for p in report["properties"] if p["outcome"] == "product_failure"}
    assert failed, output
    assert failed <= properties, output
    assert done.stdout.strip().splitlines()[-1].endswith("(exit 1)")
    for test in report["tests"]:
        if test["outcome"] == "product_failure":
            bundle = tmp_path / "out" / test["bundle"]
            assert (bundle / "timeline.txt").read_text(), test
            assert json.loads((bundle / "failure.json").read_text())["signature"]["id"] == test["signature"]
            assert f"replay: {test['replay']}" in done.stdout
    assert any(name in done.stdout for name in failed)
