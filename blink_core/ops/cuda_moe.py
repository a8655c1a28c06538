"""A mixture of experts on the GPU: route, sort tokens by expert, two grouped products, combine (design section 7)."""

from __future__ import annotations

import cupy as cp

from blink_core.ops.cuda_gemm import CudaWeight, Gemm, Norm
from blink_core.ops.cuda_modules import Kernels

# Tokens a step up to which the experts' products are bound by reading the weights: blocks of 8 rows, else of 64.
SKINNY_TOKENS = 64
MAX_EXPERTS, MAX_TOP_K = 512, 16  # moe.cu


class CudaMoe:
    """Memory of one shape of mixture, fixed at creation and shared by a model's layers.

    ``experts``, ``top_k``, ``inner``: experts of a layer, experts a token, inputs of the down projection.
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
    ) -> None:
        """``out = residual + mixture(x)``: x [T, hidden]; ``residual`` may be ``out``.

        ``router`` [experts, hidden]; ``gate_up`` [experts, 2 * inner, hidden]; ``down`` [experts, hidden, inner].
        ``sizes``: see StepArrays; only its tokens bring experts in. ``norm``: of x first, into ``normed`` [T, hidden];
        only where ``Gemm.norms`` says that the router's product can.
        """
        tokens, hidden = x.shape
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
