"""Regions and configuration: Python and C++ compute the same layout; limits are refused with value and limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_core import _native
from blink_core.abi import header
from blink_core.abi.config import ConfigError, EngineConfig, fit_shared_memory, next_power_of_two
from blink_core.abi.definition import REGIONS
from blink_core.abi.dtypes import DTYPES
from blink_core.abi.records import Field, Struct


@st.composite
def configurations(draw: Any) -> EngineConfig:
    slots, max_rows, max_len = draw(st.integers(1, 4096)), draw(st.integers(1, 4096)), draw(st.integers(2, 1 << 16))
    return EngineConfig(
        vocab=draw(st.integers(1, 2**31 - 1)),
        rings=draw(st.integers(1, 256)),
        slots=slots,
        sq_entries=next_power_of_two(2 * slots) << draw(st.integers(0, 2)),
        cq_entries=next_power_of_two(slots + max_rows) << draw(st.integers(0, 4)),
        arena_tokens=draw(st.integers(max_len, 2**31 - 1)),
        max_len=max_len,
        page_size=draw(st.integers(1, 4096)),
        pages=draw(st.integers(3, 2**31 - 1)),
        max_rows=max_rows,
        token_budget=draw(st.integers(max_rows, 1 << 20)),
        log_entries=1 << draw(st.integers(0, 28)),
        max_bias=draw(st.integers(0, 1 << 16)),
        max_logprobs=draw(st.integers(0, 20)),
        masks=draw(st.integers(0, slots)),
        lease_us=draw(st.integers(0, 2**62)),
    )


@settings(max_examples=150)
@given(configurations())
def test_cpp_computes_the_same_layout(config: EngineConfig) -> None:
    """Catches: a region whose size differs between the languages, also beyond 32 bits."""
    expected = {name: layout.nbytes for name, layout in config.layouts().items()}
    assert _native.region_sizes(config.pack().tobytes()) == expected
    assert EngineConfig.unpack(config.pack().tobytes()) == config


@given(configurations())
@settings(max_examples=30)
def test_sections_are_aligned_and_disjoint(config: EngineConfig) -> None:
    """Catches: overlapping sections, or ordering words that share or straddle a cache line."""
    for layout in config.layouts().values():
        at = 0
        for section in layout.sections.values():
            assert section.offset % 64 == 0
            assert section.offset >= at
            at = section.offset + section.nbytes
        assert layout.nbytes >= at
        assert layout.nbytes % 64 == 0


def test_header_is_current(capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a definition changed without its C++ header; and a check that never fails."""
    assert header.main(["--check"]) == 0
    stale = tmp_path / "abi.hpp"
    stale.write_text(header.HEADER.read_text().replace("uint32_t prompt_len", "uint32_t prompt_size"))
    monkeypatch.setattr(header, "HEADER", stale)
    assert header.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert header.main([]) == 0
    assert header.main(["--check"]) == 0


def test_definition_is_naturally_aligned() -> None:
    """Catches: a field that C++ would pad, and regions that name an unknown element or size."""
    with pytest.raises(ValueError, match="S.b: offset 4 is not a multiple of 8"):
        Struct("S", 16, "", (Field("a", "u32"), Field("b", "u64"))).offsets()
    with pytest.raises(ValueError, match="S: fields take 12 bytes, declared size is 8"):
        Struct("S", 8, "", (Field("a", "u64"), Field("b", "u32"))).offsets()
    sizes = set(EngineConfig(vocab=1).sizes())
    for region in REGIONS:
        for section in region.sections:
            assert section.element in DTYPES
            assert {f.strip() for f in section.count.split("*")} <= sizes | {"1"}


LIMITS: list[tuple[dict[str, Any], list[str]]] = [
    ({"vocab": 0}, ["vocab is 0", "from 1 to 2147483647"]),
    ({"vocab": 2**31}, ["vocab is 2147483648"]),
    ({"vocab": 3.5}, ["vocab is 3.5", "integer"]),
    ({"vocab": True}, ["vocab is True", "integer"]),
    ({"rings": 0}, ["rings is 0", "from 1 to 256"]),
    ({"rings": 257}, ["rings is 257", "256"]),
    ({"slots": 4097}, ["slots is 4097", "4096"]),
    ({"slots": 0}, ["slots is 0"]),
    ({"sq_entries": 1024}, ["sq_entries is 1024", "from 2048"]),
    ({"sq_entries": 3000}, ["sq_entries is 3000", "power of two"]),
    ({"sq_entries": 1 << 17}, ["sq_entries is 131072", "65536"]),
    ({"cq_entries": 1024}, ["cq_entries is 1024", "from 1040"]),
    ({"cq_entries": 5000}, ["cq_entries is 5000", "power of two"]),
    ({"arena_tokens": 2047}, ["arena_tokens is 2047", "from 2048"]),
    ({"max_len": 1}, ["max_len is 1", "from 2 to 16777216"]),
    ({"max_len": (1 << 24) + 1, "arena_tokens": 1 << 25}, ["max_len is 16777217", "16777216"]),
    ({"page_size": 0}, ["page_size is 0", "from 1 to 4096"]),
    ({"pages": 2}, ["pages is 2", "from 3"]),
    ({"max_rows": 0}, ["max_rows is 0"]),
    ({"token_budget": 15}, ["token_budget is 15", "from 16"]),
    ({"visibility_us": 0}, ["visibility_us is 0"]),
    ({"visibility_us": 2**31}, ["visibility_us is 2147483648", "from 1 to 2147483647"]),
    ({"paused_limit": 0}, ["paused_limit is 0"]),
    ({"admission": 2}, ["admission is 2", "from 0 to 1"]),
    ({"prefix_cache": 2}, ["prefix_cache is 2", "from 0 to 1"]),
    ({"quantum": 0}, ["quantum is 0", "from 1"]),
    ({"reservation_steps": 0}, ["reservation_steps is 0", "from 1"]),
    ({"lease_us": -1}, ["lease_us is -1", "from 0"]),
    ({"max_bias": (1 << 16) + 1}, ["max_bias is 65537", "to 65536"]),
    ({"max_logprobs": 21}, ["max_logprobs is 21", "from 0 to 20"]),
    ({"masks": 1025}, ["masks is 1025", "from 0 to 1024"]),
    ({"log_entries": 100}, ["log_entries is 100", "power of two"]),
    ({"log_level": 3}, ["log_level is 3", "from 0 to 2"]),
    ({"eos_ids": tuple(range(9))}, ["9 end-of-sequence ids", "at most 8"]),
    ({"eos_ids": (100,)}, ["end-of-sequence id 100", "vocabulary of 100"]),
    ({"eos_ids": (-1,)}, ["end-of-sequence id -1"]),
]


@pytest.mark.parametrize(("fields", "parts"), LIMITS, ids=[str(f) for f, _ in LIMITS])
def test_limits_name_value_and_limit(fields: dict[str, Any], parts: list[str]) -> None:
    """Catches: a size that the scheduler cannot hold taken without a word, or refused without saying why."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**({"vocab": 100} | fields))
    for part in parts:
        assert part in str(caught.value)


def test_foreign_record_is_refused() -> None:
    """Catches: the memory of another program or version taken for an engine's."""
    good = EngineConfig(vocab=100).pack().tobytes()
    with pytest.raises(ConfigError, match="magic number 0x0 is not 0x424c494e4b303031"):
        EngineConfig.unpack(bytes(256))
    with pytest.raises(ConfigError, match="engine speaks ABI 9, this code speaks 2"):
        EngineConfig.unpack(good[:8] + b"\x09\0\0\0" + good[12:])
    with pytest.raises(ConfigError, match="255 bytes, needs 256"):
        EngineConfig.unpack(good[:255])
    with pytest.raises(ConfigError, match="slots is 0"):
        EngineConfig.unpack(good[:16] + bytes(4) + good[20:])


def fit_least(config: EngineConfig) -> int:
    """Bytes of the smallest rings that a configuration may shrink to: slots halved while at least 16 are left."""
    slots = config.slots
    arena = config.arena_tokens
    while slots // 2 >= 16:
        slots //= 2
        arena = max(config.max_len, arena // 2)
    if slots == config.slots:
        return config.shared_nbytes()
    entries = next_power_of_two(4 * slots)
    return replace(config, slots=slots, arena_tokens=arena, sq_entries=entries, cq_entries=entries).shared_nbytes()


@given(st.integers(0, 64 << 20), st.sampled_from([16, 100, 256, 1024, 4096]), st.integers(1, 4))
@settings(max_examples=100)
def test_fit_shared_memory(available: int, slots: int, rings: int) -> None:
    """Catches: rings larger than the shared memory there is, shrunk below what works, or shrunk without need."""
    config = EngineConfig(
        vocab=100,
        rings=rings,
        slots=slots,
        sq_entries=next_power_of_two(4 * slots),
        cq_entries=next_power_of_two(8 * slots),
    )
    least = fit_least(config)
    if available < least:
        with pytest.raises(ConfigError, match=f"has {available} bytes free, the smallest rings need {least}"):
            fit_shared_memory(config, available)
        return
    fitted = fit_shared_memory(config, available)
    assert fitted.shared_nbytes() <= available
    assert fitted.slots >= 16
    if config.shared_nbytes() <= available:
        assert fitted == config
    kept = {"slots", "sq_entries", "cq_entries", "arena_tokens"}
    assert replace(fitted, **{name: getattr(config, name) for name in kept}) == config
