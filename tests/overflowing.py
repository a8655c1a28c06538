"""A copy of a model folder whose logits are NaN, though every weight is a number (loaders refuse others)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

LARGEST = 3.0e38  # of float32 and bfloat16: products with it are infinite, and their sums NaN


def overflowing(model: Path, target: Path, name: str = "model.norm.weight") -> Path:
    """Copies the folder `model` to `target` with `LARGEST` all over the tensor `name`. KeyError if no file has it."""
    shutil.copytree(model, target)
    for path in sorted(target.glob("*.safetensors")):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = np.full_like(tensors[name], LARGEST)
            save_file(tensors, path, metadata={"format": "pt"})
            return target
    raise KeyError(f"no tensor {name!r} in {model}")
