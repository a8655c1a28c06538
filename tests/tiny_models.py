"""The tiny model of each name, built once in a process with its seed search, for every test that wants it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from verification.models.tiny import TinyModel, build_named
from verification.oracles.hf import HFOracle


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="blink-tiny-")


@functools.cache
def tiny_model(name: str) -> TinyModel:
    """The model, whose build asserts its sensitivity. Do not write to its folder."""
    return build_named(name, Path(_folder().name) / name)


@functools.cache
def tiny_oracles(name: str) -> tuple[HFOracle, HFOracle]:
    """HuggingFace in float64 and float32 on that model."""
    return HFOracle.load_pair(tiny_model(name).path, threads=1)
