"""Children of a test that must import a copy of this tree, also where the tree itself is installed editable."""

from __future__ import annotations

import shutil
from pathlib import Path

from blink_core import _native

# An editable install finds its packages before PYTHONPATH does. The interpreter imports this file once all is set up.
_SITECUSTOMIZE = """import sys
sys.meta_path = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""


def goes_before_installed(tree: Path) -> dict[str, str]:
    """Environment variables with which a child imports from `tree`, a copy of the packages; the native module, which an
    install keeps elsewhere, is added to it."""
    built = Path(str(_native.__file__))
    if not (tree / "blink_core" / built.name).exists():
        shutil.copy(built, tree / "blink_core" / built.name)
    (tree / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
    return {"PYTHONPATH": str(tree)}
