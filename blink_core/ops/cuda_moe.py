"""A mixture of experts on the GPU: route, sort tokens by expert, two grouped products, combine (design section 7).

One token in a 16-bit type has kernels of its own: the first makes the router's logits, chooses the experts and reads
whole rows of their gate and up projections; the second adds up what the down projections make.
"""

from __future__ import annotations

import ctypes

import cupy as cp

from blink_core.ops.cuda_gemm import CudaWeight, Gemm, Norm
from blink_core.ops.cuda_modules import Kernels, multiprocessors, pointer

# Tokens a step up to which the experts' products are bound by reading the weights: blocks of 8 rows, else of 64.
SKINNY_TOKENS = 64
MAX_EXPERTS, MAX_TOP_K = 512, 16  # moe.cu, moe_choice.cuh
# Whether the blocks of one token's first product make the router's logits together, which saves a kernel.
JOIN_ROUTER = True
MPS_ATTRIBUTE = 133  # cudaDevAttrMpsEnabled
ONE_THREADS, ROUTER_WARPS = 256, 4
ONE_HIDDEN = 4096  # elements of a token that the router's kernel holds
GATE_UP_RING, DOWN_RING = 8 * 14 * 1024, 8 * 8 * 1024
AHEAD_PIECE = 4096
ONE_SHARED = 160 * 1024  # of a block at most, so that the device has it


class RouterParams(ctypes.Structure):
    """``RouterParams`` of moe_one.cu."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("x", "norm", "normed", "router", "logits")),
        ("experts", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


class OneParams(ctypes.Structure):
    """``OneParams`` of moe_choice.cuh."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("x", "norm", "normed", "router", "logits", "told", "gate_up", "down")),
        *((n, ctypes.c_void_p) for n in ("acted", "residual", "out", "index", "weight", "ahead")),
        *((n, ctypes.c_int) for n in ("experts", "top_k", "hidden", "inner", "normalize", "slots", "ahead_bytes")),
        ("eps", ctypes.c_float),
    ]


class CudaMoe:
    """Memory of one shape of mixture, fixed at creation and shared by a model's layers.

    ``experts``, ``top_k``, ``inner``: experts of a layer, experts a token, inputs of the down projection. One token's
    kernels of two layers never run at once: their blocks wait for each other through memory that is here once.
    join_router: whether they do, where they can.
    """

    def __init__(
        self,
        kernels: Kernels,
        gemm: Gemm,
        experts: int,
        top_k: int,
        hidden: int,
        inner: int,
        max_tokens: int,
        dtype: object,
    ) -> None:
        if experts > MAX_EXPERTS or top_k > min(experts, MAX_TOP_K):
            raise ValueError(f"{top_k} of {experts} experts, expected at most {MAX_TOP_K} of {MAX_EXPERTS}")
        self._kernels, self._gemm = kernels, gemm
        self._experts, self._top_k, self._inner = experts, top_k, inner
        pairs = max_tokens * top_k
        self.logits = cp.zeros((max_tokens, experts), cp.float32)
        self.index = cp.zeros((max_tokens, top_k), cp.int32)
        self.weight = cp.zeros((max_tokens, top_k), cp.float32)
        self._slots = max(experts, multiprocessors())
        self._told = cp.zeros(max(self._slots, MAX_EXPERTS), cp.uint64)  # moe_choice.cuh: never reset
        self.join_router = JOIN_ROUTER
        self._mps: bool | None = None
        self._count = cp.zeros(1, cp.int32)
        self._blocks = cp.zeros((pairs // 8 + experts + 1, 4), cp.int32)
        self._pairs = cp.zeros(pairs, cp.int32)
        self._tokens = cp.zeros(pairs, cp.int32)
        self._gate_up = cp.zeros((pairs, 2 * inner), dtype) if kernels.dtype == "float32" else None
        self._acted = cp.zeros((pairs, inner), dtype)
        self._parts = cp.zeros((pairs, hidden), dtype)

    def route(self, logits: cp.ndarray, tokens: int, *, normalize: bool) -> None:
        """Fill ``index`` and ``weight`` [tokens, top_k] from ``logits`` float32 [tokens, experts]."""
        kernel = self._kernels.get("moe.cu", "moe_route")
        kernel.launch(
            -(-tokens // 4), 128, logits, self.index, self.weight, tokens, self._experts, self._top_k, normalize
        )

    def __call__(
        self,
        x: cp.ndarray,
        router: CudaWeight,
        gate_up: CudaWeight,
        down: CudaWeight,
        sizes: cp.ndarray,
        out: cp.ndarray,
        *,
        normalize: bool,
        residual: cp.ndarray | None = None,
        norm: Norm | None = None,
        normed: cp.ndarray | None = None,
        ahead: CudaWeight | None = None,
    ) -> None:
        """``out = residual + mixture(x)``: x [T, hidden]; ``residual`` may be ``out``.

        ``router`` [experts, hidden]; ``gate_up`` [experts, 2 * inner, hidden]; ``down`` [experts, hidden, inner].
        ``sizes``: see StepArrays; only its tokens bring experts in. ``norm``: of x first, into ``normed`` [T, hidden];
        only where ``Gemm.norms`` says that the router's product can. ``ahead``: what the next layer reads first, of
        which one token's kernel may fetch some into the L2.
        """
        tokens, hidden = x.shape
        if self.takes_one(tokens, hidden):
            self._one(x, router, gate_up, down, out, normalize, residual, norm, normed, ahead)
            return
        k = self._top_k
        logits = self.logits[:tokens]
        if norm is None:
            self._gemm(x, router, logits)
        elif normed is None:
            raise ValueError("a mixture that norms its input needs the array `normed`")
        else:
            self._gemm(x, router, logits, norm=norm, normed=normed)
            x = normed
        skinny = self._kernels.dtype != "float32" and tokens <= SKINNY_TOKENS
        width = 8 if skinny else 64
        lists = (self._count, self._blocks, self._pairs, self._tokens)
        if tokens <= SKINNY_TOKENS:
            self._kernels.get("moe.cu", "moe_route_sort").launch(
                1, 512, sizes, logits, self.index, self.weight, *lists, tokens, self._experts, k, width, normalize
            )
        else:
            self.route(logits, tokens, normalize=normalize)
            self._kernels.get("moe.cu", "moe_sort").launch(1, 1024, sizes, self.index, *lists, self._experts, k, width)
        blocks = (self._count, self._blocks)
        acted = self._acted[: tokens * k]
        if self._gate_up is None:
            self._gemm.grouped(x, gate_up, acted, blocks, width, silu=True, gather=self._tokens)
        else:
            both = self._gate_up[: tokens * k]
            self._gemm.grouped(x, gate_up, both, blocks, width, gather=self._tokens)
            silu = self._kernels.get("elementwise.cu", "silu_multiply")
            parts = -(-self._inner // 2048)
            silu.launch(tokens * k * parts, 256, both, acted, self._inner, parts)
        self._gemm.grouped(acted, down, self._parts[: tokens * k], blocks, width, scatter=self._pairs)
        combine = self._kernels.get("moe.cu", "moe_combine")
        combine.launch(tokens, 256, self._parts, self.index, self.weight, residual, out, hidden, k)

    def takes_one(self, tokens: int, hidden: int) -> bool:
        """Whether the kernels for one token take a step of ``tokens`` tokens. In batch-invariant mode they take none:
        a token would have other bits in company."""
        shared = max(GATE_UP_RING + hidden * 2, DOWN_RING + self._top_k * self._inner * 2)
        fits = hidden <= ONE_HIDDEN and hidden % 8 == 0 and self._inner % 8 == 0 and shared <= ONE_SHARED
        return tokens == 1 and fits and self._kernels.dtype != "float32" and not self._gemm.invariant

    def _one(
        self,
        x: cp.ndarray,
        router: CudaWeight,
        gate_up: CudaWeight,
        down: CudaWeight,
        out: cp.ndarray,
        normalize: bool,
        residual: cp.ndarray | None,
        norm: Norm | None,
        normed: cp.ndarray | None,
        ahead: CudaWeight | None,
    ) -> None:
        if norm is not None and normed is None:
            raise ValueError("a mixture that norms its input needs the array `normed`")
        hidden, inner, experts, variants = x.shape[1], self._inner, self._experts, self._kernels.variants
        weight = None if norm is None else norm.weight
        shapes = (
            (router, (experts, hidden)),
            (gate_up, (experts, 2 * inner, hidden)),
            (down, (experts, hidden, inner)),
        )
        for given, shape in shapes:
            if given.nk.shape != shape or given.bias is not None:
                raise ValueError(f"a weight of {list(given.nk.shape)} without bias, expected {list(shape)}")
        blocks = multiprocessors(self._kernels.reserved)
        joined, eps = self._joins(blocks), 0.0 if norm is None else norm.eps
        if not joined:
            params = RouterParams(
                pointer(x), pointer(weight), pointer(normed), pointer(router.nk), pointer(self.logits), experts, hidden,
                eps,
            )  # fmt: skip
            held = 8 if hidden <= 2048 else 16
            alone = self._kernels.get("moe_one.cu", f"moe_router_one_{held}", **variants.one)
            alone.launch(-(-experts // ROUTER_WARPS), 128, params)
        following, each = self._share(ahead, blocks)
        one = OneParams(
            pointer(x if joined or norm is None else normed), pointer(weight), pointer(normed),
            pointer(router.nk if joined else None), pointer(self.logits), pointer(self._told), pointer(gate_up.nk),
            pointer(down.nk), pointer(self._acted), pointer(residual), pointer(out), pointer(self.index),
            pointer(self.weight), pointer(following), experts, self._top_k, hidden, inner, int(normalize), self._slots,
            each, eps,
        )  # fmt: skip
        ring = ONE_THREADS // 32 * variants.gate_up_ring * 1024
        first = self._kernels.get("moe_one.cu", "moe_gate_up_one", ring + hidden * 2, **variants.one)
        first.launch(blocks, ONE_THREADS, one)
        shared = DOWN_RING + self._top_k * inner * 2
        second = self._kernels.get("moe_one.cu", "moe_down_one", shared, **variants.one)
        second.launch(blocks, ONE_THREADS, one)

    def _share(self, ahead: CudaWeight | None, blocks: int) -> tuple[cp.ndarray | None, int]:
        """What ``blocks`` fetch ahead, and bytes of it for each: whole pieces, within the weight."""
        most = self._kernels.variants.ahead_kib * 1024
        if ahead is None or most == 0:
            return None, 0
        each = min(most, int(ahead.nk.nbytes) // blocks // AHEAD_PIECE * AHEAD_PIECE)
        return (ahead.nk, each) if each > 0 else (None, 0)

    def _joins(self, blocks: int) -> bool:
        """Whether the ``blocks`` of one launch may wait for each other: all must run at once. Under MPS the kernels of
        other processes may keep some of them out, and wait for others of their own."""
        if self._mps is None:
            self._mps = bool(cp.cuda.runtime.deviceGetAttribute(MPS_ATTRIBUTE, cp.cuda.Device().id))
        each = self._kernels.variants.gate_up_ring  # moe_choice.cuh: experts of a block at most
        return self.join_router and not self._mps and self._slots <= blocks * each
