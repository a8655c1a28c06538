"""The KV sanitizer's records are the same for host and GPU; needs the compiler, no GPU."""

from __future__ import annotations

import ctypes
import re

import pytest

from blink_core.ops.cuda_sources import source
from blink_core.ops.kv_tags import CACHE_BIT, TAG_WORDS
from blink_core.ops.kv_tags_abi import ROW_INFO, KvTagsParams
from blink_core.runtime.descriptor import KV_COUNTERS
from blink_core.runtime.kv_report import REPORT_RECORD, Mismatch
from blink_core.runtime.nvrtc import ARCHITECTURES, step_options
from tests.hil.gpu.test_kernels_compile import compile_kernels


def asserted() -> str:
    """C++ that holds the kernels' records to the host's, field by field."""
    facts = [
        f"sizeof(KvTagsParams) == {ctypes.sizeof(KvTagsParams)}",
        f"sizeof(RowInfo) == {ROW_INFO.itemsize}",
        f"sizeof(Report) == {REPORT_RECORD.itemsize}",
        f"WORDS == {TAG_WORDS}",
        f"CACHE_BIT == {CACHE_BIT}ull",
    ]
    facts += [f"{kind.name} == {index}" for index, kind in enumerate(Mismatch)]
    facts += [f"{name.upper()} == {index}" for index, name in enumerate(KV_COUNTERS)]
    return "\n".join(f"static_assert({fact});" for fact in facts)


def fields(struct: str) -> list[str]:
    """Names of a struct's members in the kernels' source, in order: NVRTC has no offsetof."""
    text = re.sub(r"//.*", "", source("kv_sanitizer.cu"))
    found = re.search(rf"struct {struct} {{(.*?)}};", text, re.DOTALL)
    assert found is not None, struct
    members = [m for m in found[1].split(";") if m.strip()]
    return [re.sub(r"^.*[\s*]", "", name.strip()) for member in members for name in member.split(",")]


def test_fields_stand_in_order() -> None:
    """Catches: two fields of equal size exchanged, which no size shows."""
    assert fields("KvTagsParams") == [name for name, *_ in KvTagsParams._fields_]
    assert fields("RowInfo") == list(ROW_INFO.names or ())
    assert fields("Report") == list(REPORT_RECORD.names or ())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_records_agree(architecture: str) -> None:
    """Catches: a parameter, report field, kind or counter that host and GPU place or number differently."""
    flags = (f"--gpu-architecture={architecture}", *step_options())
    assert compile_kernels(f"{source('kv_sanitizer.cu')}\n{asserted()}\n", flags) == ""


def test_a_difference_would_be_seen() -> None:
    """Catches: assertions that the compiler never reads."""
    text = f"{source('kv_sanitizer.cu')}\nstatic_assert(sizeof(Report) == {REPORT_RECORD.itemsize + 4});"
    with pytest.raises(AssertionError, match="static assertion failed|static_assert"):
        compile_kernels(text, ("--gpu-architecture=sm_90a", *step_options()))
