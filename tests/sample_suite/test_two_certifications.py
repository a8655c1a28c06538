"""Two certifications at once, as two users of one machine start them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.copied_tree import goes_before_installed
from verification.models.tiny import build_named

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500
PROPERTY = "streaming"  # whose tests need no torch in the run
CODE = """
import sys
from pathlib import Path
from verification.certificate.certify import certify
from verification.certificate.verify import verify
code = certify("local", sys.argv[1], "smoke", Path(sys.argv[2]))
found = verify(Path(sys.argv[2]))  # by the required set that certified
sys.exit(code or (0 if found.valid else f"not valid: {found}"))
"""


def installation(folder: Path) -> Path:
    """A tree of the packages with one property's tests, and a required set of that property alone, so that a whole run
    passes within seconds. All else is as it is here."""
    folder.mkdir()
    skipped = shutil.ignore_patterns("__pycache__", "test_*.py")
    for name in ("blink_core", "hil_rigs"):
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    shutil.copytree(ROOT / "verification", folder / "verification", ignore=skipped)
    suite = folder / "verification" / "suite"
    shutil.copy(ROOT / "verification" / "suite" / "test_streaming.py", suite)
    path = folder / "verification" / "required" / "local.yaml"
    required = yaml.safe_load(path.read_text(encoding="utf-8"))
    smoke = required["profiles"]["smoke"]
    smoke["properties"], smoke["situations"] = {PROPERTY: smoke["properties"][PROPERTY]}, []
    path.write_text(yaml.safe_dump(required), encoding="utf-8")
    return folder


def test_two_certifications_at_once(tmp_path: Path) -> None:
    """Catches: runs that meet in shared memory, ports, keys or folders; one that ends the other's engine, or keeps it
    from passing."""
    model = build_named("llama-gqa3", tmp_path / "tiny", seed=3).path
    tree = installation(tmp_path / "tree")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("BLINK_", "PYTEST_"))}
    environment |= goes_before_installed(tree) | {"BLINK_HOME": str(tmp_path / "home")}  # without a key: both make one
    outs = [tmp_path / "one", tmp_path / "two"]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(model), str(out)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for out in outs
    ]
    texts = [run.communicate(timeout=LIMIT_S)[0] for run in runs]
    reports = [json.loads((out / "report.json").read_text(encoding="utf-8")) for out in outs]
    for run, text, report in zip(runs, texts, reports, strict=True):
        assert run.returncode == 0, text
        assert report["verdict"]["word"] == "passed", text
        (entry,) = [one for one in report["properties"] if one["outcome"] != "missing"]
        assert (entry["name"], entry["passed"]) == (PROPERTY, entry["tests"])
        assert report["session_errors"] == []
    assert reports[0]["run"]["id"] != reports[1]["run"]["id"]
