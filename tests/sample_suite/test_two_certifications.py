"""Two certifications at once, as two users of one machine start them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from verification.certificate.verify import verify
from verification.models.tiny import build_named

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200
# A part of the suite that needs no torch: the verdict must be "could not run", and what ran must have passed.
CODE = """
import sys
from pathlib import Path
from verification.certificate.certify import certify
chosen = ("-k", "chat-1 or chat-3")
sys.exit(certify("local", sys.argv[1], "smoke", Path(sys.argv[2]), suite=Path("suite"), pytest_arguments=chosen))
"""


def test_two_certifications_at_once(tmp_path: Path) -> None:
    """Catches: runs that meet in shared memory, ports, keys or folders; one that ends the other's engine."""
    model = build_named("llama-gqa3", tmp_path / "tiny", seed=3).path
    (tmp_path / "suite").mkdir()
    shutil.copy(ROOT / "verification" / "suite" / "test_streaming.py", tmp_path / "suite")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("BLINK_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(ROOT), "BLINK_HOME": str(tmp_path / "home")}  # without a key: both make one
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
    for run, text, report, out in zip(runs, texts, reports, outs, strict=True):
        assert run.returncode == 2, text
        ran = {test["id"]: test["outcome"] for test in report["tests"] if test["outcome"] != "missing"}
        assert ran == {f"streaming/same_answer[chat-{case}]": "passed" for case in (1, 3)}, text
        assert report["session_errors"] == []
        assert verify(out).problems == ()
    assert reports[0]["run"]["id"] != reports[1]["run"]["id"]
