"""What one token of a mixture launches on the GPU; no GPU needed, so CuPy is a stand-in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from cuda.bindings import nvrtc

from blink_core.ops.cuda_sources import options, source

CODE = """
import ctypes, json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
cupy = sys.modules["cupy"] = MagicMock()
from blink_core.ops import cuda_moe
from blink_core.ops.cuda_gemm import CudaWeight, Gemm, Norm
from blink_core.ops.cuda_modules import Kernels
from blink_core.ops.cuda_variants import Variants

given = json.loads(sys.argv[1])
experts, top_k, hidden, inner = given["experts"], 2, 64, 32
cupy.cuda.Device.return_value.attributes = {"MultiProcessorCount": given["multiprocessors"]}
cupy.cuda.Device.return_value.id = 0
asked = cupy.cuda.runtime.deviceGetAttribute
asked.side_effect = lambda kind, device: given["mps"] if kind == 133 else 1 / 0

def array(address, *shape):
    return SimpleNamespace(shape=shape, data=SimpleNamespace(ptr=address))

cupy.zeros.side_effect = lambda shape, dtype: array(1, shape)
launched = []
def launch(name, shared, grid, threads, params):
    fields = {n: getattr(params, n) for n, _ in params._fields_}
    launched.append({"name": name, "shared": shared, "grid": grid, **fields})
macros = []
def get(self, file, name, shared=0, **defines):
    macros.append(defines)
    return SimpleNamespace(launch=lambda *a: launch(name, shared, *a))

Kernels.get = get
variants = Variants(ahead_kib=given["ahead"], gate_up_ring=given["ring"])
kernels = Kernels("bfloat16", reserved=given["reserved"], variants=variants)
moe = cuda_moe.CudaMoe(kernels, Gemm(kernels), experts, top_k, hidden, inner, 1, "u2")
moe.join_router = given["join"]
weights = [array(10, experts, hidden), array(11, experts, 2 * inner, hidden), array(12, experts, hidden, inner)]
following = array(30, 320, hidden)
following.nbytes = given["following"]
x, normed, norm = array(20, 1, hidden), array(21, 1, hidden), Norm(array(22, hidden), 1e-6)
for _ in range(2):
    launched.clear()
    moe(x, *[CudaWeight(w) for w in weights], None, x, normalize=True, residual=x, norm=norm, normed=normed,
        ahead=CudaWeight(following))
print(json.dumps({"launched": launched, "told": cupy.zeros.call_args_list[3].args[0], "macros": macros}))
"""
USUAL = {
    "experts": 128, "multiprocessors": 132, "reserved": 0, "mps": 0, "join": 1, "ahead": 0, "following": 1 << 20,
    "ring": 14,
}  # fmt: skip
FACTS = """
import ctypes, sys
from unittest.mock import MagicMock
sys.modules["cupy"] = MagicMock()
from blink_core.ops import cuda_moe as m
for kind in (m.RouterParams, m.OneParams):
    print(f"static_assert(sizeof({kind.__name__}) == {ctypes.sizeof(kind)});")
    print("//", kind.__name__, *(name for name, _ in kind._fields_))
for name in ("MAX_EXPERTS", "MAX_TOP_K", "AHEAD_PIECE"):
    print(f"static_assert({name} == {getattr(m, name)});")
for name in ("GATE_UP_RING", "DOWN_RING"):
    print(f"static_assert({name} * 1024 * ONE_WARPS == {getattr(m, name)});")
print(f"static_assert(ONE_WARPS * 32 == {m.ONE_THREADS} && BLOCK_SPAN * BLOCK_SPANS >= {m.ONE_HIDDEN});")
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def launches(**given: int) -> tuple[list[dict[str, Any]], int]:
    """What one token launches, and the words that the blocks have to tell each other logits."""
    answer = json.loads(run(CODE, json.dumps(USUAL | given)))
    return answer["launched"], answer["told"]


@pytest.mark.parametrize("reserved", [0, 1])
@pytest.mark.parametrize("experts", [8, 128, 512])
def test_the_router_is_joined(experts: int, reserved: int) -> None:
    """Catches: more blocks than find room at once, which wait for each other for ever; a multiprocessor's slot that
    only some launches write, so that numbers part; a norm applied twice, or not at all."""
    (first, second), told = launches(experts=experts, reserved=reserved)
    assert [first["name"], second["name"]] == ["moe_gate_up_one", "moe_down_one"]
    assert first["grid"] == second["grid"] == 132 - reserved
    assert first["slots"] == max(experts, 132)
    assert told >= max(first["slots"], 512)
    assert [first[n] for n in ("x", "norm", "normed", "router")] == [20, 22, 21, 10]
    assert first["eps"] == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "given",
    [{"mps": 1}, {"join": 0}, {"experts": 512, "multiprocessors": 36}, {"multiprocessors": 132, "reserved": 123}],
)
def test_the_router_is_apart(given: dict[str, int]) -> None:
    """Catches: blocks that wait for each other where other processes may keep some of them out, or with more experts a
    block than it has room for; a joined product behind a router of its own, which would norm its input twice."""
    (router, first, second), _ = launches(**given)
    assert [k["name"] for k in (router, first, second)] == ["moe_router_one_8", "moe_gate_up_one", "moe_down_one"]
    assert [router[n] for n in ("x", "norm", "normed", "router")] == [20, 22, 21, 10]
    assert first["x"] == 21
    assert first["router"] in (0, None)


@pytest.mark.parametrize(("ring", "reserved", "joined"), [(14, 95, True), (11, 95, False), (11, 85, True)])
def test_the_ring_holds_the_routers_rows(ring: int, reserved: int, joined: bool) -> None:
    """Catches: rows of more experts than the ring of a variant holds: they would lie over x; shared memory or a macro
    of another ring than the kernel's."""
    first = launches(experts=512, reserved=reserved, ring=ring)[0][-2]
    assert first["name"] == "moe_gate_up_one"
    assert first["shared"] == 8 * ring * 1024 + 64 * 2
    assert (first["router"] == 10) is joined
    macros = {} if ring == 14 else {"GATE_UP_RING": ring}
    assert json.loads(run(CODE, json.dumps(USUAL | {"ring": ring})))["macros"] == [macros] * 4


@pytest.mark.parametrize("experts", [128, 512])
@pytest.mark.parametrize(
    ("ahead", "following", "each"), [(0, 1 << 24, 0), (64, 1 << 24, 65536), (64, 132 * 8191, 4096), (64, 4095, 0)]
)
def test_no_block_fetches_beyond_the_weight(experts: int, ahead: int, following: int, each: int) -> None:
    """Catches: addresses behind the next layer's weight; a variant that fetches nothing, or the default that does."""
    first = launches(experts=experts, ahead=ahead, following=following)[0][0]
    assert first["ahead_bytes"] == each
    assert (first["ahead"] or 0) == (30 if each else 0)
    assert each * first["grid"] <= following


def test_parameters_agree() -> None:
    """Catches: a parameter or a size of shared memory that was changed on one side only."""
    kernels, facts = source("moe_one.cu"), run(FACTS)
    for line in (line for line in facts.splitlines() if line.startswith("//")):
        kind, *names = line.split()[1:]
        body = re.sub("//.*", "", kernels.split(f"struct {kind} {{")[1].split("};")[0])
        assert re.findall(r"(\w+)[,;]", body) == names
    text = kernels + facts
    (error, program) = nvrtc.nvrtcCreateProgram(text.encode(), b"moe_one.cu", 0, [], [])
    assert int(error) == 0
    flags = [f.encode() for f in ("--gpu-architecture=sm_90a", *options("bfloat16"))]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(error) == 0, log.decode()
