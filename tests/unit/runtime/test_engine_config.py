"""The configuration that the engine process makes of model and command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from blink_core.runtime.engine_main import parse_arguments, serve_model
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("name", "max_len", "prefix_cache"), [("phi3-longrope", None, 0), ("phi3-longrope", 16, 1), ("llama-gqa3", None, 1)]
)
def test_prefix_cache_is_off_where_keys_may_change(
    name: str, max_len: int | None, prefix_cache: int, tmp_path: Path
) -> None:
    """Catches: pages shared between a short and a long sequence of a LongRoPE model, whose keys differ."""
    arguments = ["--run-dir", str(tmp_path), "--segment", "unused", "--model", str(tiny_model(name).path)]
    arguments += [] if max_len is None else ["--max-len", str(max_len)]
    config, served = serve_model(parse_arguments([*arguments, "--pages", "8", "--prefix-cache", "1"]))
    assert served.kv is not None
    assert config.prefix_cache == prefix_cache
