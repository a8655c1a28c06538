"""Who makes a product of 9 to 32 rows on the GPU, as it was tuned; no GPU needed, so CuPy is a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

CODE = """
import json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
cupy = MagicMock()
cupy.float32 = "f4"
cupy.cuda.Device.return_value.attributes = {"MultiProcessorCount": 132}
sys.modules["cupy"] = cupy
from blink_core.ops.cublaslt import Choice
from blink_core.ops.cuda_gemm import CudaWeight, Gemm
from blink_core.ops.cuda_modules import Kernels

class Array(SimpleNamespace):
    def __init__(self, *shape, dtype="u2"):
        flags, data = SimpleNamespace(c_contiguous=True), SimpleNamespace(ptr=0)
        super().__init__(shape=shape, flags=flags, data=data, dtype=dtype)
    def __getitem__(self, rows):
        return Array(rows.stop - rows.start, *self.shape[1:], dtype=self.dtype)

rows, n, k, tiles, mode, dtype = (json.loads(a) for a in sys.argv[1:])
launched = []
def get(self, file, name, shared=0, **defines):
    return MagicMock(launch=lambda grid, threads, *a: launched.append((name, shared, grid)), places=lambda n: 1)
Kernels.get = get

class Library:
    refusal = ValueError
    def plan(self, x, weight, out):
        return SimpleNamespace(choice=Choice(tiles))
    def __call__(self, x, weight, out, residual):
        launched.append(("cuBLASLt", 0, 0))
    def by_pieces(self, x, weight, out, residual):
        for half in (slice(0, rows // 2), slice(rows // 2, rows)):
            launched.append(("cuBLASLt", 0, 0))
            yield half

gemm = Gemm(Kernels(dtype), invariant=mode == "invariant", _lt=Library())
x, weight, out = Array(rows, k), CudaWeight(Array(n, k)), Array(rows, n)
if mode == "silu":
    print(json.dumps([gemm.silu(x, weight, Array(rows, n // 2)), launched]))
elif mode == "pieces":
    print(json.dumps([[[s.start, s.stop] for s in gemm.by_pieces(x, weight, out)], launched]))
else:
    gemm(x, weight, out)
    print(json.dumps([gemm.adds_residual(x, weight, out), launched]))
"""


def run(rows: int, n: int, k: int, tiles: int, mode: str = "normal", dtype: str = "bfloat16") -> Any:
    arguments = [json.dumps(a) for a in (rows, n, k, tiles, mode, dtype)]
    command = [sys.executable, "-c", CODE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("rows", "tiles", "name", "grid"),
    [(9, 1, "skinny_16_1", 132), (16, 2, "skinny_16_2", 128), (17, 1, "skinny_32_1", 132), (32, 2, "skinny_32_2", 128),
     (32, 3, "skinny_32_3", 86)],
)  # fmt: skip
def test_the_own_kernel_that_was_found_the_fastest_is_launched(rows: int, tiles: int, name: str, grid: int) -> None:
    """Catches: another variant than the tuned one, memory for its sums left out (it then writes beyond its own), and a
    residual that both or neither of the product and the norm after it add."""
    adds, launched = run(rows, 4096, 4096, tiles)
    assert adds is True
    ((found, shared, blocks),) = launched
    assert (found, blocks) == (name, grid)
    sums = 8 * 32 * (tiles * 16 + 4) * 4 if rows > 16 else 0
    assert shared == 160 * 1024 + sums
    assert shared <= 227 * 1024


@pytest.mark.parametrize(("rows", "k"), [(9, 4096), (32, 4096)])
def test_cublaslt_keeps_what_it_makes_faster(rows: int, k: int) -> None:
    """Catches: the own kernel taken for every product of up to 32 rows, tuned or not."""
    assert run(rows, 4096, k, 0) == [False, [["cuBLASLt", 0, 0]]]


def test_the_own_kernel_takes_no_more_rows_than_it_has() -> None:
    """Catches: rows beyond the own kernel's, or inputs that it would drop, given to it by a stale choice."""
    for rows, k in ((33, 4096), (32, 4104)):
        assert run(rows, 4096, k, 2)[1] == [["cuBLASLt", 0, 0]]


@pytest.mark.parametrize(
    ("rows", "name"), [(9, "skinny_16_1"), (16, "skinny_16_1"), (17, "fixed_32"), (32, "fixed_32")]
)
def test_batch_invariant_products_ignore_the_choice(rows: int, name: str) -> None:
    """Catches: an order of additions that depends on what was measured, where bits must not depend on the batch."""
    adds, launched = run(rows, 1024, 4096, 3, "invariant")
    assert adds is True
    assert [found[0] for found in launched] == [name]


def test_few_rows_are_always_the_own_kernels() -> None:
    """Catches: a choice for other rows that takes a product of few rows from the kernel that starts early."""
    adds, launched = run(8, 4096, 4096, 0)
    assert (adds, launched[0][0]) == (True, "skinny_8_2")


def test_swiglu_goes_with_the_kernels_that_have_it() -> None:
    """Catches: a kernel with SwiGLU asked for that does not exist, or SwiGLU left out."""
    assert run(16, 4096, 4096, 2, "silu") == [True, [["skinny_silu_16_2", 160 * 1024, 128]]]
    assert run(17, 4096, 4096, 3, "silu") == [False, []]
    assert run(16, 4096, 4096, 0, "silu") == [False, []]


def test_each_piece_is_told_once_it_is_launched() -> None:
    """Catches: SwiGLU of rows whose product is not launched yet, or rows left out of it."""
    assert run(512, 4096, 4096, 0, "pieces") == [[[0, 256], [256, 512]], [["cuBLASLt", 0, 0]] * 2]
    rows, launched = run(32, 4096, 4096, 2, "pieces")
    assert (rows, [found[0] for found in launched]) == ([[0, 32]], ["skinny_32_2"])


TUNE = """
import json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
cupy = MagicMock()
sys.modules["cupy"] = cupy
from blink_core.ops.cublaslt import Choice
from blink_core.ops.cuda_gemm import CudaWeight, Gemm
from blink_core.ops.cuda_modules import Kernels

rows, own_us, refused, broken, when = (json.loads(a) for a in sys.argv[1:])
now, captured = 0.0, None

class Refusal(Exception): pass

def spend(us):
    if captured is not None:
        captured.append(us)

class Graph:
    def __init__(self, us): self.us = us
    def launch(self, stream):
        global now
        now += sum(self.us)

class Stream(MagicMock):
    def begin_capture(self):
        global captured
        if captured is not None: raise RuntimeError("the stream is capturing already")
        captured = []
    def end_capture(self):
        global captured
        us, captured = captured, None
        if "refused" in us: raise RuntimeError("the capture was invalidated")
        return Graph(us)

class Event(MagicMock):
    def record(self, stream): self.at = now

cupy.cuda.Stream, cupy.cuda.Event = Stream, Event
cupy.cuda.get_elapsed_time = lambda a, b: (b.at - a.at) / 1e3
Kernels.get = lambda self, file, name, *a, **k: MagicMock(launch=lambda *a: spend(own_us), places=lambda n: 1)
plan = SimpleNamespace(choice=Choice(algorithm=7))
library_us = {Choice(): 14.0, Choice(pieces=2): 13.0, Choice(algorithm=1): 9.0, Choice(pieces=2, algorithm=1): 15.0}

class Library:
    refusal = Refusal
    def plan(self, x, weight, out): return plan
    def choices(self, x, weight, out): return list(library_us)
    def __call__(self, x, weight, out, residual):
        if broken: raise ValueError("broken")
        captures = 0 if captured is None else 1 + len(captured)
        if refused in (-2, plan.choice.algorithm) and captures == when:
            if captured is not None: captured.append("refused")
            raise Refusal
        spend(library_us[plan.choice])

def array(*shape):
    flags, data = SimpleNamespace(c_contiguous=True), SimpleNamespace(ptr=0)
    size = shape[0] * shape[1]
    return SimpleNamespace(shape=shape, flags=flags, data=data, dtype=0, size=size)

gemm = Gemm(Kernels("bfloat16"), _lt=Library())
weights = [CudaWeight(array(4096, 4096))] * 5
try:
    tuning = gemm.tune(array(rows, 4096), weights, array(rows, 4096))
except ValueError as error:
    print(json.dumps([str(error), plan.choice.algorithm, captured]))
    sys.exit()
key = lambda c: f"{c.tiles} {c.pieces} {c.algorithm}"
print(json.dumps([key(plan.choice), {key(c): us for c, us in tuning.us.items()} if tuning else None]))
"""


def tuned(rows: int, own_us: float, refused: int = -1, *, broken: bool = False, when: int = 0) -> Any:
    """when: the product of a capture that is refused, the first one is 1; 0: outside."""
    arguments = [json.dumps(a) for a in (rows, own_us, refused, broken, when)]
    command = [sys.executable, "-c", TUNE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("rows", [9, 32])
def test_the_faster_of_both_stays_chosen(rows: int) -> None:
    """Catches: the last one measured left in place, the own kernel not measured, a graph's time for a product's."""
    choice, us = tuned(rows, 8.0)
    assert choice == "1 1 0"
    assert us["1 1 0"] == pytest.approx(8.0)
    choice, us = tuned(rows, 10.0)
    assert choice == "0 1 1"
    assert us["0 1 1"] == pytest.approx(9.0)


def test_many_rows_are_not_the_own_kernels() -> None:
    """Catches: the own kernel measured with rows that it would leave out, which makes it win."""
    choice, us = tuned(33, 1.0)
    assert choice == "0 1 1"
    assert all(name.startswith("0 ") for name in us)


def test_heavy_products_are_measured_with_fewer_weights_first() -> None:
    """Catches: times of runs of different lengths compared."""
    choice, us = tuned(2048, 1.0)
    assert choice == "0 1 1"
    assert us["0 1 1"] == pytest.approx(9.0)


@pytest.mark.parametrize("when", [0, 1, 5])
@pytest.mark.parametrize("rows", [64, 2048])
def test_an_algorithm_that_refuses_is_left_out(rows: int, when: int) -> None:
    """Catches: an engine that does not start because the library's list holds an algorithm that it then refuses, maybe
    only while it is captured, or only in the longer of a heavy product's captures; a stream that captures on."""
    choice, us = tuned(rows, 1.0, refused=1, when=when)
    assert choice == "0 2 0"
    assert set(us) == {"0 2 0", "0 1 0"}


def test_a_product_that_refuses_every_algorithm_is_an_error() -> None:
    """Catches: an engine that starts with a product that cannot be made, or with a stream that captures for ever."""
    message, _, captures = tuned(64, 1.0, refused=-2, when=1)
    assert (message, captures) == ("there is nothing to choose from", None)


def test_a_failure_leaves_the_choice_as_it_was() -> None:
    """Catches: a candidate left in place by a measurement that broke."""
    assert tuned(64, 1.0, broken=True) == ["broken", 7, None]


STEP = """
import json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
cupy = MagicMock()
sys.modules["cupy"] = cupy
from blink_core.ops.cublaslt import Choice
from blink_core.ops.cuda_gemm import Tuning, tune_step

now, captured, eager, fails = 0.0, None, [], json.loads(sys.argv[1])

class Graph:
    def __init__(self, us): self.us = us
    def launch(self, stream):
        global now
        now += self.us

class Stream(MagicMock):
    def begin_capture(self):
        global captured
        captured = 0.0
    def end_capture(self):
        global captured
        us, captured = captured, None
        return Graph(us)

class Event(MagicMock):
    def record(self, stream): self.at = now

cupy.cuda.Stream, cupy.cuda.Event = Stream, Event
cupy.cuda.get_elapsed_time = lambda a, b: (b.at - a.at) / 1e3

def tuning(name, *choices):
    return Tuning(choices[0], {c: 10.0 + i for i, c in enumerate(choices)}, lambda c: now_chosen.update({name: c}))

library, slower, own, more = Choice(), Choice(algorithm=4), Choice(2), Choice(3)
tunings = {"qkv": tuning("qkv", library, slower, more, own), "out": tuning("out", own, library),
           "gate_up": tuning("gate_up", library, slower)}
now_chosen = {name: t.choice for name, t in tunings.items()}

def step():
    global captured
    took = (now_chosen["qkv"].name, now_chosen["out"].name)
    if captured is None:
        eager.append(took)
    elif took not in eager:
        raise RuntimeError("captured before its kernels were loaded")
    elif fails and took == ("own 3", "own 2"):
        raise RuntimeError("refused")
    else:
        captured = {("own 3", "own 2"): 4618.0, ("own 3", "algo 0"): 4655.0}.get(took, 4650.0)

try:
    duels = tune_step(list(tunings.values()), step)
    told = [[list(d.taken), list(d.other), d.won] for d in duels]
except RuntimeError as error:
    told = str(error)
print(json.dumps([{name: c.name for name, c in now_chosen.items()}, told, captured, sorted(set(eager))]))
"""


def in_step(*, fails: bool = False) -> Any:
    command = [sys.executable, "-c", STEP, json.dumps(fails)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_choice_is_the_one_that_makes_the_step_short() -> None:
    """Catches: what wins alone kept though another one is faster in its step; the last one tried left in place; another
    own kernel than the best of them; a product without an own kernel tried in whole steps; a capture of kernels that
    are not loaded."""
    chosen, duels, _, eager = in_step()
    assert chosen == {"qkv": "own 3", "out": "own 2", "gate_up": "algo 0"}
    assert duels[0] == [[0, 0], [1, 0], True]
    assert [d[2] for d in duels].count(True) == 1
    assert ["own 2", "own 2"] not in eager


def test_a_step_that_fails_leaves_the_choices_as_they_were() -> None:
    """Catches: a combination left in place by a measurement that broke, and a stream that captures on."""
    chosen, told, captures, _ = in_step(fails=True)
    assert (chosen, told) == ({"qkv": "algo 0", "out": "own 2", "gate_up": "algo 0"}, "refused")
    assert captures is None


PLANS = """
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock
cupy = MagicMock()
cupy.float32 = "f4"
sys.modules["cupy"] = cupy
from blink_core.ops.cublaslt import Choice, CublasLt
from blink_core.ops.cuda_gemm import CudaWeight

library = object.__new__(CublasLt)
library._plans, library._type, library.target = {}, 14, 0
library._make = lambda *a: SimpleNamespace(choice=Choice())
array = lambda *shape, dtype="u2": SimpleNamespace(shape=shape, dtype=dtype)
x, nk = array(16, 4096), array(4096, 4096)
weights = {"out": CudaWeight(nk, part="out"), "gate_up": CudaWeight(nk, part="gate_up"),
           "bias": CudaWeight(nk, nk, part="out")}
plans = [library.plan(x, w, array(16, 4096)) for w in weights.values()]
plans.append(library.plan(x, weights["out"], array(16, 4096, dtype="f4")))
plans[0].choice = Choice(2)
library.target = 131
plans.append(library.plan(x, weights["out"], array(16, 4096)))
library.target = 0
again = library.plan(x, CudaWeight(array(4096, 4096), part="out"), array(16, 4096))
print(*(p.choice.tiles for p in plans), again.choice.tiles)
"""


def test_products_of_one_shape_have_choices_of_their_own() -> None:
    """Catches: the choice of one product taken for another of equal shape that ends with SwiGLU, has a bias, is of
    another type or has fewer multiprocessors; and one that another layer does not get."""
    done = subprocess.run([sys.executable, "-c", PLANS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["2", "0", "0", "0", "0", "2"], done.stderr


NAMES = """
import sys
from unittest.mock import MagicMock
sys.modules["cupy"] = MagicMock()
from blink_core.ops.cublaslt import Choice
from blink_core.ops.cuda_gemm import Tuning
from hil_rigs.gpu.profile import library_name
print(library_name((1024, 28672, 4096), Choice(pieces=2, algorithm=13)))
print(library_name((64, 6144, 4096), Choice(algorithm=1)))
print(Tuning(Choice(3), {Choice(): 14.0, Choice(algorithm=2): 10.12, Choice(3): 10.04}).line)
"""


def test_tables_say_how_a_product_is_made() -> None:
    """Catches: a table that does not tell algorithms or pieces apart, or shows another's time as the choice's."""
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.splitlines() == [
        "cuBLASLt 1024x28672x4096 algo 13 1/2",
        "cuBLASLt 64x6144x4096 algo 1",
        "own 3 10.0, algo 2 10.1, algo 0 14.0 us",
    ], done.stderr
