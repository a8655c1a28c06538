"""What the suite expects of a model's length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from verification.fixtures import Subject


@pytest.mark.parametrize(("own", "expected"), [(256, 256), (512, 512), (8192, 512)])
def test_length_is_the_models_where_it_is_shorter(own: int, expected: int) -> None:
    """Catches: an engine blamed for the context limit of a model that is shorter than the rig asked for."""
    nothing = cast(Any, None)
    subject = Subject("model", nothing, nothing, nothing, nothing, asked_len=512)
    oracle = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=own))
    subject.__dict__["oracles"] = (oracle, oracle)
    assert subject.max_len == expected
