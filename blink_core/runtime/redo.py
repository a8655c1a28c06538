"""Passes ahead of a step's plan on the GPU: rows that outgrow LongRoPE's original maximum are computed anew.

`blink_core.models.phi3` says what must be computed. The host's model does it within its forward pass; on the GPU the
same step graphs run over parts of the row's earlier positions first. Needs neither a GPU nor CuPy.
"""

from __future__ import annotations

import numpy as np

from blink_core.abi.dtypes import Array

# `Redo` of device/kernels/redo.cuh. count 0: the plan itself runs.
REDO = np.dtype(
    [*((n, np.int32) for n in ("row", "first", "count", "reserved")), ("number", np.uint64), ("done", np.uint64)]
)


def redo_parts(rows: Array, original_max: int, most: int) -> list[tuple[int, int, int]]:
    """What LongRoPE asks to be computed anew ahead of a plan's ``rows`` (PlanRow): (row, first position, count), at
    most ``most`` positions each, in order; as the resident scheduler does it (serve_kernel.cu, next_redo).

    original_max: 0 without LongRoPE.
    """
    found = []
    for row, (context, new) in enumerate(zip(rows["context_len"].tolist(), rows["q_len"].tolist(), strict=True)):
        start = context - new
        if original_max and start <= original_max < context:
            found += [(row, first, min(most, start - first)) for first in range(0, start, most)]
    return found
