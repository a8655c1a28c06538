"""Logits capture: a file of records that the engine appends when asked, so that every emitted token can be re-scored.

One record per sampled row: `CAPTURE` header, then `vocab` float32 logits as they entered the sampler.
"""

from __future__ import annotations

import numpy as np

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
