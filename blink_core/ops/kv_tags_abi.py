"""Records of `device/kernels/kv_sanitizer.cu` as the host writes them; needs neither a GPU nor CuPy."""

from __future__ import annotations

import ctypes

import numpy as np

ROW_INFO = np.dtype(
    [
        *((name, np.uint64) for name in ("owner", "written", "life")),
        *((name, np.uint32) for name in ("start", "skip")),
    ]
)
VIEW = ("token_ids", "positions", "kv_slots", "row_starts", "context_lens", "table_rows")
OWN = ("tags", "fresh", "expected", "rows", "first", "condemned", "counters", "reports")


class KvTagsParams(ctypes.Structure):
    """``KvTagsParams`` of kv_sanitizer.cu."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("config", "header", "plan_rows", "requests", "sampling", "pages")),
        *((n, ctypes.c_void_p) for n in ("token_pool", "block_tables", "results")),
        *((n, ctypes.c_void_p) for n in VIEW),
        *((n, ctypes.c_void_p) for n in OWN),
        *((n, ctypes.c_uint32) for n in ("layers", "max_reports")),
    ]
