"""Paged attention on the GPU: the work list of a step and the kernels that take from it (design section 7)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from blink_core.ops.cuda_modules import Kernels, pointer

UNIT = 64  # attention_plan.cu
TILE_ROWS = 128  # attention_prefill.cu
HEADS_AT_ONCE = 16  # attention_decode.cu
THREADS = 128  # of a block of either kernel
WAVES = 4  # decode blocks wanted, in times of what the GPU holds: evens out the rounding
MIN_CHUNK = 256  # keys of a split: below, its fixed cost outweighs what more blocks gain
KEY_PIECE = 512  # keys whose sums are made at once in batch-invariant mode; changes bits
MAX_PIECES = 1024  # of rows with one new token that have blocks of their own
HEAD_DIMS = (64, 96, 128)  # of the tensor-core kernels; float32's takes any
LOG2E = 1.4426950408889634


class PlanParams(ctypes.Structure):
    """``PlanParams`` of attention_plan.cu."""

    _fields_ = [
        (n, ctypes.c_int)
        for n in ("heads_work", "target", "fixed_chunk", "min_chunk", "tile_tokens", "window", "max_items", "max_tiles")
    ] + [("piece", ctypes.c_int), ("max_pieces", ctypes.c_int)]


class DecodeParams(ctypes.Structure):
    """``DecodeParams`` of attention_decode.cu."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_longlong),
        *((n, ctypes.c_void_p) for n in ("k", "v", "out", "counts", "items", "block_tables")),
        *((n, ctypes.c_void_p) for n in ("partial", "partial_sums", "arrived")),
        ("table_stride", ctypes.c_longlong),
        *((n, ctypes.c_int) for n in ("heads", "kv_heads", "max_items")),
        ("scale", ctypes.c_float),
    ]


class RopeParams(ctypes.Structure):
    """``RopeParams`` of rope.cuh."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("cos", "sin", "positions", "kv_slots", "norm", "k_pages", "v_pages")),
        *((n, ctypes.c_int) for n in ("heads", "kv_heads", "half")),
        ("eps", ctypes.c_float),
    ]


class JoinedParams(ctypes.Structure):
    """``DecodeParams`` of attention_decode.cu with JOINED."""

    _fields_ = [("decode", DecodeParams), ("rope", RopeParams)]


class PrefillParams(ctypes.Structure):
    """``PrefillParams`` of attention_prefill.cu."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_longlong),
        *((n, ctypes.c_void_p) for n in ("k", "v", "out", "counts", "tiles", "block_tables", "tickets")),
        *((n, ctypes.c_void_p) for n in ("running", "partial", "partial_sums", "arrived")),
        ("table_stride", ctypes.c_longlong),
        *((n, ctypes.c_int) for n in ("heads", "kv_heads", "window")),
        ("scale", ctypes.c_float),
    ]


class StrictParams(ctypes.Structure):
    """``StrictParams`` of attention_strict.cu."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_longlong),
        *((n, ctypes.c_void_p) for n in ("k", "v", "out", "sizes", "row_starts", "context_lens", "token_rows")),
        *((n, ctypes.c_void_p) for n in ("block_tables", "table_rows")),
        ("table_stride", ctypes.c_longlong),
        *((n, ctypes.c_int) for n in ("heads", "kv_heads", "window")),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model's attention and the page size."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are not a multiple of {self.kv_heads} key-value heads")
        if self.heads // self.kv_heads > TILE_ROWS:
            raise ValueError(
                f"{self.heads // self.kv_heads} query heads a key-value head, expected at most {TILE_ROWS}"
            )
        if self.head_dim % 8 or not 8 <= self.head_dim <= 128:
            raise ValueError(f"head_dim is {self.head_dim}, expected a multiple of 8 up to 128")

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads

    @property
    def blocks_per_item(self) -> int:
        """Decode blocks that one split of a row makes."""
        return self.kv_heads * -(-self.group // HEADS_AT_ONCE)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What the kernels read of a step, on the device. Everything may be padded: ``sizes`` says what is there.

    sizes int32 [4]: rows, tokens, samples, 0. row_starts int32 [R+1], context_lens int32 [R], table_rows int32 [R] (row
    of block_tables), block_tables uint32 [., P].
    """

    sizes: cp.ndarray
    row_starts: cp.ndarray
    context_lens: cp.ndarray
    block_tables: cp.ndarray
    table_rows: cp.ndarray


class CudaAttentionPlan:
    """Work list of one step for one window, made by :meth:`make` on the device; its memory is fixed at creation.

    ``max_rows``, ``max_tokens``: of a step. ``fixed_chunk``: keys of a decode row's split whatever the batch; None: as
    the batch allows. ``invariant``: a token gets the same bits in any step, by decode as by prefill: 16-bit types take
    the prefill kernel for every row, which then makes each token's sums for pieces of KEY_PIECE keys, cut by position.
    """

    def __init__(
        self,
        kernels: Kernels,
        shape: AttentionShape,
        max_rows: int,
        max_tokens: int,
        *,
        window: int | None = None,
        fixed_chunk: int | None = None,
        invariant: bool = False,
        max_context: int = 1 << 17,
    ) -> None:
        if kernels.dtype != "float32" and shape.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {shape.head_dim}, {kernels.dtype} attention has kernels for {HEAD_DIMS}")
        self.kernels, self.shape, self.window = kernels, shape, window
        self.arrays: StepArrays | None = None
        self.all_tiles = invariant and kernels.dtype != "float32"
        places = 2 * cp.cuda.Device().attributes["MultiProcessorCount"]
        target = WAVES * places
        if fixed_chunk is not None and (fixed_chunk < UNIT or fixed_chunk % UNIT):
            raise ValueError(f"fixed_chunk must be a multiple of {UNIT}, got {fixed_chunk}")
        splits = -(-max_context // fixed_chunk) * max_rows if fixed_chunk else target // shape.blocks_per_item + 1
        max_items = max_rows + splits
        tile_tokens = TILE_ROWS // shape.group
        max_tiles = max_rows + -(-max_tokens // tile_tokens)
        self._blocks = places  # of the prefill kernel, each of which keeps sums of its own in batch-invariant mode
        running = 1
        if self.all_tiles:
            max_items, max_tiles = 1, max_tiles + MAX_PIECES
            running = self._blocks * shape.head_dim * THREADS
        self._params = PlanParams(
            shape.blocks_per_item, target, fixed_chunk or 0, MIN_CHUNK, tile_tokens, window or 0, max_items, max_tiles,
            KEY_PIECE if self.all_tiles else 0, MAX_PIECES,
        )  # fmt: skip
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self.counts = cp.zeros(4, cp.int32)
        self.items = cp.zeros((max_items, 8), cp.int32)
        self.tiles = cp.zeros((max_tiles, 8 if self.all_tiles else 4), cp.int32)
        self.token_rows = cp.zeros(max_tokens, cp.int32)
        parts = MAX_PIECES if self.all_tiles else max_items
        self.partial = cp.zeros((parts, shape.heads, shape.head_dim), cp.float32)
        self.partial_sums = cp.zeros((parts, shape.heads, 2), cp.float32)
        self.running = cp.zeros(running, cp.float32)
        self.tickets = cp.zeros(2, cp.int32)
        self.arrived = cp.zeros((max_rows, shape.blocks_per_item), cp.int32)

    @property
    def nbytes(self) -> int:
        """Device memory of the plan."""
        arrays = (self.items, self.tiles, self.token_rows, self.partial, self.partial_sums, self.arrived, self.running)
        return int(sum(a.nbytes for a in arrays))

    def make(self, arrays: StepArrays) -> None:
        """Fill the list from the step's rows, on the current stream."""
        rows = arrays.context_lens.shape[0]
        if rows > self._max_rows:
            raise ValueError(f"{rows} rows, the plan was made for {self._max_rows}")
        self.arrays = arrays
        kernel = self.kernels.get("attention_plan.cu", "attention_plan")
        kernel.launch(
            1, 256, arrays.sizes, arrays.row_starts, arrays.context_lens, arrays.table_rows, self._params, self.counts,
            self.items, self.tiles, self.token_rows,
        )  # fmt: skip
        # A launch without dependence: the attention kernels read the list before they wait for their predecessor.
        self.kernels.get("attention_plan.cu", "attention_plan_made").launch(1, 32, dependent=False)

    def joins(self, *, decode: bool, prefill: bool) -> bool:
        """Whether the decode kernel may do what comes before it (``rope`` of :meth:`attend`): no rows of several new
        tokens can be in the step, and the step is small enough (`Variants.join_rows`). After :meth:`prepare`."""
        if self.arrays is None:
            raise ValueError("the attention plan has not been made")
        own = self.kernels.dtype != "float32" and not self.all_tiles
        return own and decode and not prefill and self.arrays.context_lens.shape[0] <= self.kernels.variants.join_rows

    def attend(
        self,
        q: cp.ndarray,
        q_stride: int,
        k: cp.ndarray,
        v: cp.ndarray,
        out: cp.ndarray,
        *,
        decode: bool,
        prefill: bool,
        rope: RopeParams | None = None,
    ) -> None:
        """Attention of the step's tokens over one layer's pages.

        ``q``: [T, ., head_dim], query heads first, rows ``q_stride`` elements apart. ``k``, ``v`` [pages, page_size,
        kv_heads, head_dim]. ``out`` [T, heads * head_dim]. ``decode``, ``prefill``: whether rows of one or of several
        new tokens can be in the step. ``rope``: the kernel also norms and rotates queries and keys and writes the new
        keys and values, all of them in ``q``; only where :meth:`joins` says so.
        """
        if self.arrays is None:
            raise ValueError("the attention plan has not been made")
        a, s = self.arrays, self.shape
        defines = {"HEAD_DIM": s.head_dim, "PAGE_SIZE": s.page_size}
        tables = (pointer(a.block_tables), pointer(a.table_rows))
        stride = a.block_tables.shape[1]
        tail = (stride, s.heads, s.kv_heads, self.window or 0)
        scale = float(np.float32(s.head_dim**-0.5))
        common: tuple[Any, ...] = (pointer(q), q_stride, pointer(k), pointer(v), pointer(out))
        if self.kernels.dtype == "float32":
            params = StrictParams(
                *common, pointer(a.sizes), pointer(a.row_starts), pointer(a.context_lens), pointer(self.token_rows),
                *tables, *tail, scale,
            )  # fmt: skip
            kernel = self.kernels.get("attention_strict.cu", "attention_strict", **defines)
            kernel.launch(min(q.shape[0] * s.heads, kernel.places(THREADS)), THREADS, params)
            return
        row = (s.head_dim + 8) * 2
        if decode and not self.all_tiles:
            variants, rows = self.kernels.variants, a.context_lens.shape[0]
            shared = 4 * variants.stages(rows) * 2 * 16 * row
            macros = defines | variants.attention(rows, joined=rope is not None)
            name = "attention_decode" if rope is None else "attention_rope"
            kernel = self.kernels.get("attention_decode.cu", name, shared, **macros)
            decode_params = DecodeParams(
                *common, pointer(self.counts), pointer(self.items), pointer(a.block_tables), pointer(self.partial),
                pointer(self.partial_sums), pointer(self.arrived), stride, s.heads, s.kv_heads, self.items.shape[0],
                scale * LOG2E,
            )  # fmt: skip
            both = decode_params if rope is None else JoinedParams(decode_params, rope)
            kernel.launch(kernel.places(THREADS), THREADS, both)
        if prefill or self.all_tiles:
            defines |= {"KEY_PIECE": KEY_PIECE} if self.all_tiles else {}
            kernel = self.kernels.get("attention_prefill.cu", "attention_prefill", (128 + 4 * 64) * row, **defines)
            prefill_params = PrefillParams(
                *common, pointer(self.counts), pointer(self.tiles), pointer(a.block_tables), pointer(self.tickets),
                pointer(self.running), pointer(self.partial), pointer(self.partial_sums), pointer(self.arrived),
                *tail, scale * LOG2E,
            )  # fmt: skip
            places = kernel.places(THREADS)
            kernel.launch(min(places, self._blocks) if self.all_tiles else places, THREADS, prefill_params)
