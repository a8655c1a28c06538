"""Weight files as named float32 tensors under HuggingFace names: GGUF and safetensors (design section 7)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blink_core.models.errors import ModelError
from blink_core.models.loaders.source import TensorSource, WeightReader

if TYPE_CHECKING:
    from blink_core.models.config import ModelConfig
    from blink_core.models.family import Family

__all__ = ["TensorSource", "WeightReader", "open_source"]


def open_source(path: Path, family: Family, config: ModelConfig) -> TensorSource:
    """Open the weights at ``path``: a ``.gguf`` file or a HuggingFace directory with safetensors.

    ``family`` and ``config`` say how GGUF names its tensors and orders the rows of the query and key projections.
    Raises ModelError if there is nothing there that a loader understands.
    """
    from blink_core.models.loaders.gguf import GGUFSource
    from blink_core.models.loaders.safetensors import SafetensorsSource

    if path.is_dir():
        return SafetensorsSource(path)
    if path.suffix == ".gguf":
        interleaved = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if family.gguf_interleaved else {}
        return GGUFSource(path, names=family.gguf_names, interleaved=interleaved)
    raise ModelError(f"{path}: expected a .gguf file or a HuggingFace directory")
