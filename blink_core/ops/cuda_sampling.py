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


THREADS = 512  # of select.cuh: threads of a block
MOST_PARTS = 8  # blocks of a row's cluster: the most that every GPU with clusters has room for


def parts_of(samples: int, *, clusters: bool, invariant: bool) -> int:
    """Blocks of a row in a step of ``samples`` rows: as many as run at once, for a block takes a multiprocessor.

    ``clusters``: whether the GPU has them. ``invariant``: a row's sums have the same order in any step.
    """
    if not clusters:
        return 1
    return MOST_PARTS if invariant else max(1, MOST_PARTS >> max(0, (samples - 1).bit_length() - 4))


class CudaSampler:
    """Memory of the sampler, fixed at creation.

    ``vocab``: true vocabulary; ids from there on are never chosen. ``max_samples``: rows of logits of a step.
    ``max_running``: rows of penalty counts, 4 bytes an id each. ``width``: alternatives kept of a row.
    ``invariant``: log probabilities have the same bits in a step of any number of rows.
    """

    def __init__(
        self,
        kernels: Kernels,
        vocab: int,
        max_samples: int,
        max_running: int,
        width: int = 20,
        *,
        invariant: bool = False,
    ) -> None:
        self.stride = -(-vocab // 4) * 4
        self.vocab, self.width, self.max_samples = vocab, width, max_samples
        self._kernels, self._invariant = kernels, invariant
        self._clusters = int(cp.cuda.Device().compute_capability) >= 90  # of "90"
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
        parts = parts_of(samples, clusters=self._clusters, invariant=self._invariant)
        self._kernels.get("sampler.cu", "sample_rows", PARTS=parts).launch(samples * parts, THREADS, params)
