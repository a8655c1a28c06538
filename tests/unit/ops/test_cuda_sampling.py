"""How the sampler shares out rows on the GPU; no GPU needed, so CuPy is a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
cupy = sys.modules["cupy"] = MagicMock()
cupy.float32 = "f4"
samples, major, invariant = json.loads(sys.argv[1])
cupy.cuda.Device.return_value.compute_capability = f"{major}0"
from blink_core.ops import cuda_sampling
from blink_core.ops.cuda_modules import Kernels
launched = []
def get(self, file, name, shared=0, **macros):
    return SimpleNamespace(launch=lambda grid, threads, params: launched.append([macros, grid, threads]))
Kernels.get = get
cuda_sampling.pointer = lambda array: 0
sampler = cuda_sampling.CudaSampler(Kernels("bfloat16"), 1000, 256, 256, invariant=invariant)
sampler(SimpleNamespace(shape=(samples, 1000), dtype="f4"), *[None] * 5)
print(json.dumps(launched))
"""


@pytest.mark.parametrize(
    ("samples", "major", "invariant", "parts"),
    [
        *((samples, 9, False, 8) for samples in (1, 8, 16)),
        *((samples, 9, False, parts) for samples, parts in ((17, 4), (32, 4), (64, 2), (65, 1), (128, 1), (256, 1))),
        *((samples, 9, True, 8) for samples in (1, 33, 256)),
        *((samples, 8, invariant, 1) for samples in (1, 256) for invariant in (False, True)),
    ],
)
def test_a_row_has_as_many_blocks_as_run_at_once(samples: int, major: int, invariant: bool, parts: int) -> None:
    """Catches: a grid that is no whole number of clusters, or another number of blocks than the kernel was compiled
    for; blocks that wait for others to end; sums that depend on the batch where they must not."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([samples, major, invariant])], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[{"PARTS": parts}, samples * parts, 512]]
