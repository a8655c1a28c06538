"""The registered thresholds file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from verification.thresholds import DEFAULT_PATH, ThresholdError, TieLimit, default_thresholds, load_thresholds


def test_digest_is_of_the_file_and_any_edit_changes_it(tmp_path: Path) -> None:
    """Catches: an edited threshold that leaves old certificates standing."""
    data = DEFAULT_PATH.read_bytes()
    assert default_thresholds().digest == hashlib.sha256(data).hexdigest()
    edited = tmp_path / "t.yaml"
    edited.write_bytes(data.replace(b"rms_factor: 8.0", b"rms_factor: 9.0", 1))
    assert load_thresholds(edited).tokens.rms_factor == 9.0
    assert load_thresholds(edited).digest != default_thresholds().digest


def test_registered_values_are_those_of_the_design() -> None:
    """Catches: a silently loosened criterion (design section 9: 8x, p99, twice the bound, 100x)."""
    limits = default_thresholds()
    assert (limits.tokens.rms_factor, limits.kv.rms_factor, limits.tokens.regret_factor) == (8.0, 8.0, 2.0)
    assert limits.tokens.reference_percentile == limits.kv.reference_percentile == 99.0
    assert limits.tiny_models.margin_factor == 100.0


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("rms_factor: 8.0", "rms_factor: -1.0", "rms_factor"),
        ("rms_factor: 8.0", "rms_factor: .inf", "rms_factor"),
        ("rms_factor: 8.0", "rms_factor: '8'", "rms_factor"),
        ("min_rows: 100", "min_row: 100", "min_row"),
        ("confidence: 0.95", "confidence: 1.0", "confidence"),
        ("version: 1", "version: 2", "version"),
        ("version: 1", "digest: 00\nversion: 1", "digest"),
        ("version: 1", "[", "t.yaml"),
        ("most_tests: 100", "most_tests: 101", "family-wise"),
        ("error_rate: 1.0e-6", "error_rate: 1.0e-5", "family-wise"),
    ],
)
def test_bad_files_are_refused_with_the_field(tmp_path: Path, old: str, new: str, named: str) -> None:
    """Catches: a typing error in the file that switches a limit off."""
    path = tmp_path / "t.yaml"
    path.write_text(DEFAULT_PATH.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ThresholdError, match=named):
        load_thresholds(path)
    with pytest.raises(ThresholdError, match="absent"):
        load_thresholds(tmp_path / "absent.yaml")


def test_every_registered_limit_is_used() -> None:
    """Catches: a limit in the file that no check reads: whoever tightens it changes nothing."""
    folder = DEFAULT_PATH.parent
    text = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    text += "".join(path.read_text(encoding="utf-8") for path in (folder.parent / "tests").rglob("test_*.py"))
    sections = yaml.safe_load(DEFAULT_PATH.read_text(encoding="utf-8"))
    names = [name for values in sections.values() if isinstance(values, dict) for name in values]
    assert [name for name in names if f".{name}" not in text] == []


def test_ties_are_allowed_by_started_blocks() -> None:
    """Catches: a limit on ties that grows without end, or that is zero for a short run."""
    limit = TieLimit(maximum=2, per_rows=1000)
    assert [limit.allowed(n) for n in (0, 1, 1000, 1001, 5000)] == [0, 2, 2, 4, 10]
