"""The suite against an engine whose families are wrong in what they have beside Llama."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from hil_rigs.description import RIGS_DIR
from verification.certificate.supervise import plugin_arguments

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "tests" / "planted" / "engine.py"
WRONG = ("mistral-window", "phi3-longrope", "qwen3-moe")


def test_a_family_that_is_wrong_is_named(tmp_path: Path) -> None:
    """Catches: programs too short for a window or a RoPE switch, a window off by one, experts' weights that no token
    hangs on; and a family blamed for the fault of another."""
    description = yaml.safe_load((RIGS_DIR / "local.yaml").read_text(encoding="utf-8"))
    description |= {"name": "planted", "engine_command": [str(ENGINE), "family-parts"]}
    (tmp_path / "planted.yaml").write_text(yaml.safe_dump(description), encoding="utf-8")
    suite = ROOT / "verification" / "suite"
    command = [sys.executable, "-m", "pytest", "-q", *plugin_arguments(), "--rig-file", "planted.yaml"]
    command += ["-c", str(suite.parent / "suite.ini"), "--out", "out", "-k", "test_tiny_models and not gqa7"]
    command += [str(suite / "test_token_equivalence.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    outcomes = {entry["id"]: entry["outcome"] for entry in report["tests"] if entry["outcome"] != "missing"}
    expected = {f"token-equivalence/tiny_models[{name}]": "product_failure" for name in WRONG}
    assert outcomes == expected | {"token-equivalence/tiny_models[llama-gqa3]": "passed"}, done.stdout
