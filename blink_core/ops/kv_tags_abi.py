"""Records of `device/kernels/kv_sanitizer.cu` as the host writes them; needs neither a GPU nor CuPy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

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
        *((n, ctypes.c_void_p) for n in ("redo", "told", "offered")),
        ("limit_ns", ctypes.c_uint64),
        *((n, ctypes.c_uint32) for n in ("layers", "max_reports")),
    ]


@dataclass(frozen=True, slots=True)
class KvHostMemory:
    """Host memory that the kernels write while the host reads it, by address: reports [max_reports] of
    ``REPORT_RECORD``; told uint64 [len(KV_COUNTERS)], of which the host writes the number of reports it has taken;
    offered uint64, the number of those that are there."""

    reports: int
    told: int
    offered: int
    max_reports: int
