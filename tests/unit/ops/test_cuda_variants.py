"""Layouts of decode kernels: which macros and how much shared memory each launches with; no GPU, CuPy is a stand-in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from cuda.bindings import nvrtc

from blink_core.ops.cuda_sources import options, source
from blink_core.ops.cuda_variants import DEFAULT, OWN, Variants
from hil_rigs.gpu.step_ab import PLAIN

CODE = """
import json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
cupy = sys.modules["cupy"] = MagicMock()
cupy.cuda.Device.return_value.attributes = {"MultiProcessorCount": 132}
cupy.cuda.Device.return_value.id = 0
cupy.cuda.runtime.deviceGetAttribute = lambda kind, device: 227 * 1024
from blink_core.ops import cuda_attention
from blink_core.ops.cuda_gemm import CudaWeight, Gemm, Norm
from blink_core.ops.cuda_modules import Kernels
from blink_core.ops.cuda_variants import Variants

given = json.loads(sys.argv[1])
given["attention_stages"] = tuple(given["attention_stages"])
rows = int(sys.argv[2])
launched = []

def get(self, file, name, shared=0, **defines):
    def launch(grid, threads, *args, dependent=True):
        rope = getattr(args[0], "rope", None) if args else None
        launched.append([name, shared, defines, None if rope is None else [rope.heads, rope.half]])
    return SimpleNamespace(launch=launch, places=lambda threads: 264)

Kernels.get = get
def array(*shape):
    flat = SimpleNamespace(c_contiguous=True)
    return SimpleNamespace(shape=shape, flags=flat, data=SimpleNamespace(ptr=16), dtype=0, nbytes=1 << 20)

kernels = Kernels("bfloat16", variants=Variants(**given))
gemm = Gemm(kernels)
gemm(array(rows, 2048), CudaWeight(array(5120, 2048)), array(rows, 5120), norm=Norm(array(2048), 1e-6))
gemm(array(rows, 4096), CudaWeight(array(2048, 4096)), array(rows, 2048))
plan = cuda_attention.CudaAttentionPlan(kernels, cuda_attention.AttentionShape(32, 4, 128, 16), rows, rows)
plan.counts = plan.items = plan.partial = plan.partial_sums = plan.arrived = array(9, 9)
plan.arrays = cuda_attention.StepArrays(*(array(rows, 9) for _ in range(5)))
rope = cuda_attention.RopeParams(heads=32, half=64) if plan.joins(decode=True, prefill=False) else None
assert not plan.joins(decode=True, prefill=True)
plan.attend(array(1), 1, array(1), array(1), array(1), decode=True, prefill=False, rope=rope)
print(json.dumps(launched))
"""
RESERVED = 1024  # bytes of shared memory that the driver takes of each block
MULTIPROCESSOR = 228 * 1024
SUMS = 8 * 8 * (16 + 4) * 4  # bytes of gemm_skinny.cu's static memory in its kernels of one tile and 8 rows


def launches(variants: Variants, rows: int = 1) -> list[list[Any]]:
    """Name, dynamic shared memory, macros and rotation of the QKV product, the output product and attention."""
    fields = {name: getattr(variants, name) for name in variants.__slots__}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(fields), str(rows)], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def block(launch: list[Any]) -> int:
    """Shared memory that a block of the launch takes of its multiprocessor."""
    name, dynamic, macros, _ = launch
    if name.startswith("skinny"):
        return int(dynamic) + SUMS + RESERVED
    _, program = nvrtc.nvrtcCreateProgram(source("attention_decode.cu").encode(), b"attention_decode.cu", 0, [], [])
    flags = ("--gpu-architecture=sm_90a", "--ptxas-options=-v", *options("bfloat16", **macros))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(error) == 0, log.decode()
    (used,) = re.findall(r"(\d+) bytes smem", log.decode())
    return int(dynamic) + int(used) + RESERVED


def test_the_sources_own_layout_needs_no_macro() -> None:
    """Catches: a layout that compiles other kernels than the sources' own where nothing differs."""
    heads = {"HEAD_DIM": 128, "PAGE_SIZE": 16}
    assert launches(PLAIN) == [
        ["skinny_norm_8_1", 8 * 16 * 1024 + 2080 * 2, {}, None],
        ["skinny_8_1", 8 * 20 * 1024, {}, None],
        ["attention_decode", 4 * 3 * 2 * 16 * 272, heads, None],
    ]


def test_rotation_is_joined_in_small_steps_alone() -> None:
    """Catches: norm and rotation joined into attention where that was measured to be slower, or not at all."""
    assert [launches(DEFAULT, rows)[2][0] for rows in (1, 8)] == ["attention_rope"] * 2
    assert launches(replace(DEFAULT, join_rows=7), 8)[2][0] == "attention_decode"


def test_rings_and_macros_agree() -> None:
    """Catches: shared memory for another ring than the kernel's: it would write behind its own, or the GPU refuse it;
    a variant that a launch ignores."""
    variants = Variants(ring=16, norm_ring=17, attention_stages=(2, 3), leave=True, join_rows=64)
    qkv, out, attention = launches(variants)
    assert qkv[1:] == [8 * 17 * 1024 + 2080 * 2, {"RING": 16, "NORM_RING": 17}, None]
    assert out[1:] == [8 * 16 * 1024, {"RING": 16, "NORM_RING": 17}, None]
    heads = {"HEAD_DIM": 128, "PAGE_SIZE": 16}
    assert attention == [
        "attention_rope",
        4 * 2 * 2 * 16 * 272,
        heads | {"STAGES": 2, "LEAVE": 1, "JOINED": 1},
        [32, 64],
    ]
    _, out, many = launches(replace(variants, few_rows=7), rows=8)
    assert many[1:3] == [4 * 3 * 2 * 16 * 272, heads | {"LEAVE": 1, "JOINED": 1}]
    assert out[1:3] == [8 * 20 * 1024, {}]


def test_own_macros_are_the_sources() -> None:
    """Catches: a default of a source that was changed alone, so that a launch brings shared memory for another ring."""
    text = "".join(source(file) for file in ("gemm_skinny.cu", "moe_one.cu", "attention_decode.cu"))
    assert {name: [str(value)] for name, value in OWN.items()} == {
        name: re.findall(rf"#ifndef {name}\n#define {name} (\d+)\n#endif", text) for name in OWN
    }


def test_what_fits_on_a_multiprocessor_at_once() -> None:
    """Catches: a ring that grew so that the blocks of a mixture's kernels cannot start before those of the kernel ahead
    of them have ended; and two blocks of one product on a multiprocessor."""
    qkv, out, _ = launches(DEFAULT)
    assert 2 * min(block(qkv), block(out)) > MULTIPROCESSOR
    choice = 128 + 8 * 4 + DEFAULT.gate_up_ring * 8 * 4  # static memory of moe_one.cu's kernels at most
    gate_up = 8 * DEFAULT.gate_up_ring * 1024 + 2048 * 2 + choice + RESERVED
    down = 8 * 8 * 1024 + 8 * 768 * 2 + choice + RESERVED
    assert block(out) + gate_up <= MULTIPROCESSOR
    assert gate_up + down <= MULTIPROCESSOR < gate_up + 2 * down
    _, plain, _ = launches(PLAIN)
    assert block(plain) + gate_up > MULTIPROCESSOR  # what the default's rings are for


@pytest.mark.parametrize(
    "given",
    [
        {"ring": 14},
        {"norm_ring": 26},
        {"gate_up_ring": 7},
        {"attention_stages": (1, 3)},
        {"ahead_kib": 6},
        {"ahead_kib": -4},
    ],
)
def test_layouts_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    """Catches: rings of which two blocks find room, a ring without a copy in flight, a piece of the L2's cut in two."""
    with pytest.raises(ValueError, match=next(iter(given))):
        Variants(**given)
