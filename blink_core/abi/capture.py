"""Logits capture: a file of records that the engine appends when asked, so that every emitted token can be re-scored.

One record per sampled row: `CAPTURE` header, then `vocab` float32 logits as they entered the sampler.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from blink_core.abi.dtypes import Array

CAPTURE = np.dtype(
    [
        ("step", "<u8"),
        ("ring", "<u4"),
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("position", "<u4"),  # absolute position of the sampled token
        ("token", "<i4"),
        ("vocab", "<u4"),
    ]
)


def record_dtype(vocab: int) -> np.dtype[np.void]:
    """dtype of one whole record: the header's fields and `logits` float32[vocab]."""
    return np.dtype([*[(n, CAPTURE[n]) for n in CAPTURE.names or ()], ("logits", "<f4", (vocab,))])


def read_capture(path: Path, vocab: int) -> Array:
    """All complete records of a capture file. Raises ValueError if its vocabulary is another."""
    dtype = record_dtype(vocab)
    size = path.stat().st_size if path.exists() else 0
    records: Array = np.fromfile(path, dtype, size // dtype.itemsize) if size else np.zeros(0, dtype)
    if records.size and not (records["vocab"] == vocab).all():
        raise ValueError(f"{path} holds logits of {int(records['vocab'][0])} ids, expected {vocab}")
    return records
