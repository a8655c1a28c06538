"""Which products of a bucket are measured at start, and with what; no GPU needed, so CuPy is a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

CODE = """
import json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
sys.modules["cupy"] = MagicMock()
from blink_core.ops.cuda_gemm import CudaWeight, Gemm
from blink_core.ops.cuda_modules import Kernels
from blink_core.ops.cuda_ops import CudaOps
from blink_core.runtime import cuda_step
from blink_core.runtime.cuda_step import Bucket, CudaStep

def array(*shape):
    return SimpleNamespace(shape=shape, nbytes=2 * shape[0] * shape[1])

calls, worked = [], []
class Ops:
    dtype, batch_invariant, kernels = sys.argv[1], sys.argv[2] == "invariant", Kernels("bfloat16")
    gemm = SimpleNamespace(skinny_rows=8)
    def empty(self, *shape): return array(*shape)
    def gate_up_silu(self, x, weight, out, scratch): worked.append([out.shape, scratch.shape])

def tune(x, weights, out, work=None, *, silu=False):
    calls.append([list(x.shape), list(out.shape), len(weights), silu, ops.kernels.reserved])
    if work: work(weights[0])
    return SimpleNamespace(line="", options=())

class Rows:
    def __init__(self, width): self.width = width
    def __getitem__(self, rows): return array(rows.stop, self.width)

ops = Ops()
ops.gemm.tune = tune
cuda_step.random_normal = lambda dtype, rows, n: array(rows, n)
weight = lambda n, k: CudaWeight(array(n, k))
down = json.loads(sys.argv[4])
layer = lambda: SimpleNamespace(qkv=weight(6144, 4096), out=weight(4096, 4096), gate_up=weight(28672, 4096),
                                down=weight(*down))
network = SimpleNamespace(layers=[layer() for _ in range(32)], head=weight(128256, 4096))
step = object.__new__(CudaStep)
step._ops, step.network, step._tuned, step._acted, step.logits = ops, network, set(), Rows(14336), Rows(128256)
step.products, whole = [], []
cuda_step.tune_step = lambda tunings, run: whole.append(len(tunings)) or []
for arguments in json.loads(sys.argv[3]):
    step.tune(Bucket(*arguments[:4]), resident=arguments[4])
print(json.dumps([calls, worked, whole]))
"""


DOWN = (4096, 14336)


def tuned(
    *buckets: tuple[int, int, int, bool, bool],
    dtype: str = "bfloat16",
    mode: str = "normal",
    down: tuple[int, int] = DOWN,
) -> Any:
    command = [sys.executable, "-c", CODE, dtype, mode, json.dumps(buckets), json.dumps(down)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_product_of_a_bucket_is_measured_as_the_step_makes_it() -> None:
    """Catches: a product left out, rows of the bucket taken for the sampled ones, SwiGLU left out of what is timed (the
    own kernel has it for nothing), and too few weights, so that they are read from the L2."""
    calls, worked, whole = tuned((2048, 64, 16, False, True))
    assert whole == [5]
    assert calls == [
        [[2048, 4096], [2048, 6144], 7, False, 1],
        [[2048, 4096], [2048, 4096], 10, False, 1],
        [[2048, 4096], [2048, 28672], 4, True, 1],
        [[2048, 14336], [2048, 4096], 4, False, 1],
        [[16, 4096], [16, 128256], 1, False, 1],
    ]
    assert worked == [[[2048, 14336], [2048, 28672]]]


def test_a_shape_is_measured_once_for_each_place() -> None:
    """Catches: a start that measures what it knows, and the choice for the whole GPU taken beside a resident block."""
    calls, _, whole = tuned((64, 64, 64, False, True), (64, 64, 8, False, True), (64, 64, 64, True, False))
    assert [call[4] for call in calls] == [1] * 5 + [0] * 5
    assert whole == [5, 5]  # nothing new in the second bucket


def test_another_product_of_equal_shape_is_measured_too() -> None:
    """Catches: the choice for one product taken for the next one of its shape: that one may end with SwiGLU, or add a
    residual."""
    for down in ((28672, 4096), (4096, 4096), (6144, 4096)):
        calls, _, _ = tuned((64, 64, 64, False, True), down=down)
        assert [call[3] for call in calls] == [False, False, True, False, False]


def test_few_rows_and_fixed_orders_have_nothing_to_measure() -> None:
    """Catches: an engine in batch-invariant or strict mode whose bits depend on a measurement."""
    assert tuned((8, 8, 8, True, True))[0] == []
    assert tuned((64, 64, 64, True, True), mode="invariant")[0] == []
    assert tuned((64, 64, 64, True, True), dtype="float32")[0] == []
