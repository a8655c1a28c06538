"""Helpers of the model scenarios: a configuration file, and the paged driver of the model tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.models.conftest import TINY, PagedDriver, write_tiny

__all__ = ["PagedDriver", "config_file", "write_tiny"]


def config_file(folder: Path, **changes: Any) -> dict[str, Any]:
    """Writes the config.json of a small Llama; `changes` replace entries. Gives what was written."""
    raw = TINY | changes
    if "rope_parameters" in changes:
        raw.pop("rope_theta", None)
        raw["rope_parameters"] = {"rope_theta": TINY["rope_theta"], **changes["rope_parameters"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return raw
