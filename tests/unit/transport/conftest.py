"""Engines that are closed when their test has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.transport.ring_engine import Stepped


@pytest.fixture
def make() -> Iterator[Callable[..., Stepped]]:
    made: list[Stepped] = []

    def build(**fields: Any) -> Stepped:
        made.append(Stepped(**fields))
        return made[-1]

    yield build
    for engine in made:
        engine.runtime.close()
