"""The `blink` command's own options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verification.certificate.provenance import tool_version

ROOT = Path(__file__).resolve().parents[3]


def blink(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verification.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def test_version_is_printed() -> None:
    """Catches: no way to say which version a finding is about."""
    done = blink("--version")
    assert (done.returncode, done.stdout) == (0, f"blink {tool_version()}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rig", "local", "--rig-file", "a.yaml"), "--rig local and --rig-file a.yaml: name one rig"),
        (("--rig-file", "a.json"), "ends in .yaml"),
        (("--rig-file", "absent.yaml"), "cannot read the rig description"),
    ],
)
def test_bad_rig_of_certify(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """Catches: one of two rigs silently ignored; a traceback for a file that is not there."""
    done = blink("certify", "--out", str(tmp_path / "out"), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
