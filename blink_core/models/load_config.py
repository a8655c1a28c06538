"""Configuration of a model on disk, whatever its format."""

from __future__ import annotations

from pathlib import Path

from blink_core.models.config import ModelConfig
from blink_core.models.errors import ModelError
from blink_core.models.gguf_config import from_gguf
from blink_core.models.hf_config import from_directory


def load_config(path: str | Path) -> ModelConfig:
    """Configuration of the model at ``path``: a ``.gguf`` file, or a HuggingFace directory with ``config.json``.

    Raises ModelError, naming value and limit, if it is damaged or asks for anything the engine would compute wrongly:
    another architecture, another kind of RoPE scaling, another activation, quantised safetensors.
    """
    path = Path(path)
    if path.is_dir():
        return from_directory(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: expected a .gguf file or a HuggingFace directory with config.json")
    return from_gguf(path)
