"""Registers the marker of tests that need a GPU; without one they are skipped."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU, CuPy and nvmath-python")
