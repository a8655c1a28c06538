"""What products on the GPU refuse before they launch anything; no GPU needed, so CuPy is a stand-in."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock
sys.modules["cupy"] = MagicMock()
from blink_core.ops.cuda_gemm import CudaWeight, Gemm
from blink_core.ops.cuda_modules import Kernels

def array(*shape):
    return SimpleNamespace(shape=shape, flags=SimpleNamespace(c_contiguous=True), data=SimpleNamespace(ptr=0), dtype=0)

call, dtype, inputs, invariant = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "invariant"
launched = []
Kernels.get = lambda self, file, name, *a, **k: MagicMock(launch=lambda *a: launched.append(name), places=lambda n: 1)
gemm, x, out = Gemm(Kernels(dtype), invariant=invariant), array(9, inputs), array(9, 64)
if call == "tile":
    gemm.tile(x, CudaWeight(array(64, inputs)), out)
else:
    gemm.grouped(x, CudaWeight(array(4, 64, inputs)), out, (array(1), array(9, 4)), int(call))
print(*launched)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("call", ["8", "64", "tile"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["normal", "invariant"])
def test_inputs_that_a_kernel_would_drop_are_refused(call: str, dtype: str, mode: str) -> None:
    """Catches: the inputs beyond a multiple of 32, silently left out of an expert's product: wrong tokens, no error."""
    done = run(call, dtype, "40", mode)
    assert done.returncode != 0
    assert f"ValueError: own {dtype} products take a multiple of 32 inputs, got 40" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("call", "dtype", "inputs", "kernel"),
    [("8", "bfloat16", "96", "grouped_skinny_8"), ("64", "float16", "96", "grouped_tile"),
     ("64", "float32", "40", "grouped_tile"), ("tile", "float32", "40", "tile")],
)  # fmt: skip
def test_other_inputs_are_taken(call: str, dtype: str, inputs: str, kernel: str) -> None:
    """Catches: a guard that also refuses what the kernels do take; float32's adds up any number of inputs."""
    done = run(call, dtype, inputs, "normal")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [kernel]


MIXTURE = """
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock
sys.modules["cupy"] = MagicMock()
from blink_core.ops.cuda_gemm import CudaWeight, Gemm
from blink_core.ops.cuda_modules import Kernels
from blink_core.ops.cuda_moe import CudaMoe

given, places = [], lambda n: 1
Kernels.get = lambda self, file, name, *a, **k: MagicMock(launch=lambda *a: None, places=places)
Gemm.__call__ = lambda *a, **k: None
Gemm.grouped = lambda self, x, weight, out, blocks, width, **k: given.append((blocks, width))
kernels = Kernels("float32")
moe = CudaMoe(kernels, Gemm(kernels), 8, 2, 64, 5000, 9, "f4")
moe(SimpleNamespace(shape=(9, 64)), *[MagicMock()] * 5, normalize=True)
print(len(given), all(blocks == (moe._count, moe._blocks) and width == 64 for blocks, width in given))
"""


def test_both_products_of_a_float32_mixture_have_the_same_blocks() -> None:
    """Catches: the list of blocks lost between the two products of the experts, where SwiGLU is a kernel of its own."""
    done = subprocess.run([sys.executable, "-c", MIXTURE], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "True"]
