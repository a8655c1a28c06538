"""Where the real model lies, for tests that use it: $BLINK_TEST_MODEL, or the store that `blink model fetch` fills."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blink_core.model_store import stored_path

NAME = "SmolLM2-135M-Instruct"


def real_model() -> Path:
    """Path of the GGUF file; skips the test where it has not been fetched (`make test` fetches it)."""
    path = Path(os.environ.get("BLINK_TEST_MODEL") or stored_path(NAME))
    if not path.is_file():
        pytest.skip(f"{path} is not there; run: blink model fetch {NAME}")
    return path
