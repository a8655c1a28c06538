"""Weight files as named float32 tensors under HuggingFace names: GGUF and safetensors (design section 7)."""

from __future__ import annotations

from pathlib import Path

from blink_core.models.errors import ModelError
from blink_core.models.loaders.source import TensorSource, WeightReader

__all__ = ["TensorSource", "WeightReader", "open_source"]


def open_source(path: Path, *, num_heads: int, num_kv_heads: int) -> TensorSource:
    """Open the weights at ``path``: a ``.gguf`` file or a HuggingFace directory with safetensors.

    ``num_heads`` and ``num_kv_heads`` are needed to undo GGUF's row order of the query and key projections.
    Raises ModelError if there is nothing there that a loader understands.
    """
    from blink_core.models.loaders.gguf import GGUFSource
    from blink_core.models.loaders.safetensors import SafetensorsSource

    if path.is_dir():
        return SafetensorsSource(path)
    if path.suffix == ".gguf":
        return GGUFSource(path, num_heads=num_heads, num_kv_heads=num_kv_heads)
    raise ModelError(f"{path}: expected a .gguf file or a HuggingFace directory")
