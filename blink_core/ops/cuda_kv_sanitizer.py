"""The KV sanitizer of the GPU (design section 5): its memory, and launches of `device/kernels/kv_sanitizer.cu`.

All launches go to CuPy's current stream and may be captured; the sizes of the step are read on the device. In a step:
``begin`` behind the step view, ``append`` and then ``check`` in each layer between the kernel that writes keys and
values and attention, ``end`` behind the sampler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import cupy as cp

from blink_core.abi.config import EngineConfig
from blink_core.ops.cuda_modules import Kernel
from blink_core.ops.cuda_sources import source
from blink_core.ops.kv_tags import TAG_WORDS
from blink_core.ops.kv_tags_abi import OWN, ROW_INFO, VIEW, KvHostMemory, KvTagsParams

BLOCK = 256
MAX_REPORTS, RECORD_BYTES = 1000, 72
TAKE_LIMIT_NS = 10_000_000_000
KERNELS = ("kv_tags_begin", "kv_tags_append", "kv_tags_check", "kv_tags_report", "kv_tags_end")
_STATE = ("config", "requests", "sampling", "pages", "tokens", "block_tables")
_PLAN = ("header", "rows", "results")


class CudaKvSanitizer:
    """Tags of a KV pool on the GPU.

    tags uint64 [2, layers, pages, page_size, TAG_WORDS]. counters uint64 [len(KV_COUNTERS)]. reports uint8
    [max_reports * 72], ``REPORT_RECORD``s (`runtime.kv_report.KvReport.from_record`), unless they are host memory's.
    """

    def __init__(
        self,
        config: EngineConfig,
        layers: int,
        *,
        state: int,
        plan: int,
        view: Mapping[str, cp.ndarray],
        options: tuple[str, ...],
        redo: int = 0,
        host: KvHostMemory | None = None,
    ) -> None:
        """state, plan: device addresses of the scheduler's regions. view: what step_view makes of the plan, by name:
        token_ids, positions, kv_slots, row_starts, context_lens, table_rows. options: NVRTC's for kernels that read the
        plan's records (`runtime.nvrtc.step_options`). redo: address of the pass that runs, see redo.cuh, 0: there are
        none. host: where the host is told while a resident scheduler runs; without it read counters and reports."""
        requests = config.rings * config.slots
        self._config, self._layers, self._view = config, layers, view
        self.tags = cp.zeros((2, layers, config.pages, config.page_size, TAG_WORDS), cp.uint64)
        self.fresh = cp.zeros((config.token_budget, TAG_WORDS), cp.uint64)
        self.expected = cp.zeros((config.max_rows, config.max_len, 2), cp.uint64)
        self.rows = cp.zeros(config.max_rows * ROW_INFO.itemsize, cp.uint8)
        self.first = cp.full(config.max_rows, (1 << 64) - 1, cp.uint64)
        self.condemned = cp.zeros(requests, cp.uint64)
        self.counters = cp.zeros(5, cp.uint64)
        self.reports = cp.zeros(MAX_REPORTS * RECORD_BYTES if host is None else 1, cp.uint8)
        sections = {name: part.sections for name, part in config.layouts().items()}
        at = {name: state + sections["State"][name].offset for name in _STATE}
        at |= {f"plan_{name}": plan + sections["Plan"][name].offset for name in _PLAN}
        self._params = KvTagsParams(
            at["config"], at["plan_header"], at["plan_rows"], at["requests"], at["sampling"], at["pages"],
            at["tokens"], at["block_tables"], at["plan_results"],
            *(int(view[name].data.ptr) for name in VIEW),
            *(int(getattr(self, name).data.ptr) for name in OWN[:-1]),
            int(self.reports.data.ptr) if host is None else host.reports,
            redo, host.told if host else 0, host.offered if host else 0, TAKE_LIMIT_NS,
            layers, host.max_reports if host else MAX_REPORTS,
        )  # fmt: skip
        module = cp.RawModule(code=source("kv_sanitizer.cu"), backend="nvrtc", options=options)
        self._kernels = {name: Kernel(name, module.get_function(name)) for name in KERNELS}
        self._blocks = 2 * int(cp.cuda.Device().attributes["MultiProcessorCount"])

    def _launch(self, name: str, grid: int, *more: Any) -> None:
        self._kernels[name].launch(grid, BLOCK, self._params, *more, dependent=False)

    def begin(self) -> None:
        """What each request of the plan knows its tokens to be, and the tags of the new ones."""
        self._launch("kv_tags_begin", self._config.max_rows)

    def append(self, layer: int) -> None:
        """Tags of one layer's new keys and values."""
        self._launch(
            "kv_tags_append", max(1, -(-self._config.token_budget * TAG_WORDS // BLOCK)), ctypes.c_uint32(layer)
        )

    def check(self, layer: int, window: int | None) -> None:
        """Holds every row that one layer's attention is about to read against what its reader must find."""
        self._launch("kv_tags_check", self._blocks, ctypes.c_uint32(layer), ctypes.c_uint32(window or 0))
        self._launch("kv_tags_report", 1, ctypes.c_uint32(layer))

    def end(self) -> None:
        """Lets no token of a request pass that read a wrong row."""
        self._launch("kv_tags_end", 1)

    @property
    def nbytes(self) -> int:
        """Device memory of it all."""
        return sum(int(getattr(self, name).nbytes) for name in OWN)
