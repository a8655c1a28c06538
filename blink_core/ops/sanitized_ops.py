"""The NumPy operations under the KV sanitizer: tags go where keys and values go, and are checked before they are read.

Tags are written by the very function that writes keys and values, and gathered by the very function that gathers them,
so that a row which lands or is read elsewhere takes its tag with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from blink_core.ops.attention import AttentionPlan
from blink_core.ops.kv_tags import U64
from blink_core.ops.numpy_ops import F32, I32, I64, NumpyOps


class TagStore(Protocol):
    """Keeps the tags (`blink_core.runtime.kv_sanitizer.KvSanitizer`)."""

    def begin_run(
        self, token_ids: I32, positions: I32, row_starts: I32, context_lens: I32, origin: I32 | None
    ) -> None: ...

    def tags_of(self, pages: npt.NDArray[Any]) -> U64:
        """Tags of one layer's keys or values, uint64 [pages, page_size, TAG_WORDS]."""
        ...

    def new_tags(self) -> U64:
        """Of the run's new tokens, uint64 [T, TAG_WORDS]."""
        ...

    def check(self, pages: npt.NDArray[Any], plan: AttentionPlan, batch_invariant: bool) -> None:
        """Checks what attention is about to read of one layer's keys or values."""
        ...


@dataclass(slots=True)
class SanitizedOps(NumpyOps):
    """NumpyOps that write and check tags once they have a store."""

    store: TagStore | None = None

    def begin_run(self, token_ids: I32, positions: I32, row_starts: I32, context_lens: I32, origin: I32 | None) -> None:
        if self.store is not None:
            self.store.begin_run(token_ids, positions, row_starts, context_lens, origin)

    def append_kv(self, pages: F32, kv_slots: I64, values: F32) -> None:
        append: Any = NumpyOps.append_kv
        append(self, pages, kv_slots, values)
        if self.store is not None:
            append(self, self.store.tags_of(pages), kv_slots, self.store.new_tags())

    def paged_attention(self, q: F32, k_pages: F32, v_pages: F32, plan: AttentionPlan) -> F32:
        if self.store is not None:
            for pages in (k_pages, v_pages):
                self.store.check(pages, plan, self.batch_invariant)
        return NumpyOps.paged_attention(self, q, k_pages, v_pages, plan)
