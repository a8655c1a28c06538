"""Runs pytest with the sanitized native module: `LD_PRELOAD=... python -m tests.planted.sanitized MODULE ARGS...`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.planted.load import replace_native


def main(argv: list[str]) -> int:
    module = replace_native(Path(argv[0]))
    print(f"native module: {module.__file__}", flush=True)
    return int(pytest.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
