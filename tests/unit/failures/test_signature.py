"""Signatures: one for one fault, another for another."""

from __future__ import annotations

import pytest

from verification.failures.signature import normalise, signature

SAME = {
    "numbers": ("request 3 got token index 4 where 5 was next", "request 11 got token index 0 where 17 was next"),
    "floats": ("row error 1.25e-3 is 9.5 times the limit", "row error 3 is 812 times the limit"),
    "names with digits": ("float32's p99 is 3", "float32's p99 is 4711"),
    "plural": ("1 page leaked", "3 pages leaked"),
    "addresses": ("object at 0x7f00aa", "object at 0x12"),
    "lists": ("got [(1, 2, 4, 6)] for slot 3", "got [(1, 2, 4, 6), (3, 4, 5, 6)] for slot 1"),
    "texts": ("text differs: 'ab' whole, \"it's\" streamed", "text differs: 'x y z' whole, '' streamed"),
    "ids": (
        "request 0123456789abcdef0123456789abcdef failed",
        "request 6e34f0a2-1111-4222-8333-abcdefabcdef failed",
    ),
    "paths": ("cannot open /tmp/pytest-1/a/capture.bin", "cannot open /var/run/other/capture.bin"),
    "merged": ("page 4 leaked (3 of 9 checks invalid)", "page 5 leaked (1 of 2 checks invalid)"),
    "merged, redacted": ("page 4 leaked (<n> of 9 checks invalid)", "page 5 leaked"),
    "redacted": ("request 1 got token <n>", "request 9 got token 55"),
    "log tail": (
        "the engine is gone: engine exited with status -9\n2026-01-01 10:00:00,000 INFO blink.engine: ready: 5",
        "the engine is gone: engine exited with status -9\n2026-01-02 11:00:00,000 INFO blink.engine: ready: 77",
    ),
    "nan": ("logit is nan at 3", "logit is 4.0 at 12"),
}
DIFFERENT = {
    "status": ("engine exited with status -9", "engine exited with status -11"),
    "cause": (
        "engine exited with status 1\nValueError: page 3 is bad",
        "engine exited with status 1\nMemoryError: out of pages",
    ),
    "reason": ("expected one ERROR BAD_TOKEN, got []", "expected one ERROR CHECKSUM, got []"),
    "words": ("page 3 leaked", "page 3 was freed twice"),
}


@pytest.mark.parametrize("name", sorted(SAME))
def test_same_fault_has_one_signature(name: str) -> None:
    """Catches: a signature that varies with slot, step, value, time, path or address."""
    one, other = SAME[name]
    assert normalise(one) == normalise(other)


def test_pattern_is_readable() -> None:
    """Catches: names that lose their digits, or words that lose their sense, in what people read and match."""
    assert normalise("3 of 9 rows exceed HuggingFace float32's p99 (worst 1.2)") == (
        "N of N row exceed HuggingFace float32's p99 (worst N)"
    )


@pytest.mark.parametrize("name", sorted(DIFFERENT))
def test_different_faults_differ(name: str) -> None:
    """Catches: a signature that throws two faults together."""
    one, other = DIFFERENT[name]
    assert normalise(one) != normalise(other)


def test_property_clause_and_outcome_count() -> None:
    """Catches: the same words under another clause taken for the same fault; an undecided check for a violation."""
    base = signature("product_failure", "kv-content", "tokens", "row 3 differs")
    assert base == signature("product_failure", "kv-content", "tokens", "row 9 differs")
    others = [
        signature("unknown", "kv-content", "tokens", "row 3 differs"),
        signature("product_failure", "kv-content", "rows", "row 3 differs"),
        signature("product_failure", "streaming", "tokens", "row 3 differs"),
    ]
    assert len({base.id, *(other.id for other in others)}) == 4
