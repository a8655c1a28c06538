"""The sampler on the GPU (design section 7): the same choice as ops.sampling, inside the step graph."""

from __future__ import annotations

import ctypes

import cupy as cp
import numpy as np

from blink_core.ops.cuda_modules import Kernels, pointer

# SampleRow of device/kernels/sample_row.cuh. On the device step_view.cu writes it from the plan.
SAMPLE_ROW = np.dtype(
    [
        *((n, np.uint64) for n in ("seed", "owner", "tokens", "bias", "mask")),
        *((n, np.float32) for n in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")),
        *((n, np.uint32) for n in ("top_k", "choice", "position", "logprobs")),
        *((n, np.uint32) for n in ("prompt_len", "n_tokens", "n_bias", "n_barred", "row", "out")),
        ("barred", np.int32, 16),
    ]
)
BIAS_PAIR = np.dtype([("token", np.int32), ("bias", np.float32)])
STEP_RESULT = np.dtype(
    [("token", np.int32), ("logprob", np.float32), ("status", np.uint32), ("reserved", np.uint32)]
)  # abi StepResult


class SamplerParams(ctypes.Structure):
    """``SamplerParams`` of sampler.cu."""

    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        *((n, ctypes.c_void_p) for n in ("rows", "sizes", "results", "top_tokens", "top_logprobs", "work")),
        *((n, ctypes.c_void_p) for n in ("counts", "owners", "counted")),
        ("vocab", ctypes.c_int),
        ("width", ctypes.c_int),
    ]


THREADS, PARTS = 512, 8  # of select.cuh and sampler.cu: threads of a block, blocks of a row


class CudaSampler:
    """Memory of the sampler, fixed at creation.

    ``vocab``: true vocabulary; ids from there on are never chosen. ``max_samples``: rows of logits of a step.
    ``max_running``: rows of penalty counts, 4 bytes an id each. ``width``: alternatives kept of a row.
    """

    def __init__(self, kernels: Kernels, vocab: int, max_samples: int, max_running: int, width: int = 20) -> None:
        self.stride = -(-vocab // 4) * 4
        self.vocab, self.width, self.max_samples = vocab, width, max_samples
        self._kernel = kernels.get("sampler.cu", "sample_rows")
        self._work = cp.zeros((max_samples, self.stride), cp.float64)
        self._counts = cp.zeros((max_running, vocab), cp.uint32)
        self._owners = cp.zeros(max_running, cp.uint64)
        self._counted = cp.zeros(max_running, cp.uint32)

    @property
    def nbytes(self) -> int:
        """Device memory of the sampler."""
        return int(self._work.nbytes + self._counts.nbytes + self._owners.nbytes + self._counted.nbytes)

    def __call__(
        self,
        logits: cp.ndarray,
        rows: cp.ndarray,
        sizes: cp.ndarray,
        results: cp.ndarray,
        top_tokens: cp.ndarray,
        top_logprobs: cp.ndarray,
    ) -> None:
        """Choose a token for each of the first ``sizes[2]`` rows.

        ``logits`` float32 [S, stride] (what is beyond the vocabulary is not looked at); ``rows`` uint8 [S * 168]:
        SAMPLE_ROW records; ``results`` uint8, STEP_RESULT records, and ``top_tokens`` int32, ``top_logprobs`` float32
        [., width], all indexed by the rows' ``out``.
        """
        samples = logits.shape[0]
        if logits.dtype != cp.float32 or logits.shape[1] < self.stride or samples > self.max_samples:
            raise ValueError(
                f"logits must be float32 [at most {self.max_samples}, at least {self.stride}], "
                f"got {logits.dtype} {list(logits.shape)}"
            )
        if logits.shape[1] != self.stride:
            raise ValueError(f"rows of logits must be {self.stride} apart, got {logits.shape[1]}")
        params = SamplerParams(
            pointer(logits), self.stride, pointer(rows), pointer(sizes), pointer(results), pointer(top_tokens),
            pointer(top_logprobs), pointer(self._work), pointer(self._counts), pointer(self._owners),
            pointer(self._counted), self.vocab, self.width,
        )  # fmt: skip
        self._kernel.launch(samples * PARTS, THREADS, params)
