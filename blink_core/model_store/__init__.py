"""Model files on disk: fetching pinned ones and resolving `--model`.

No model code is imported here, so that the verification suite can resolve a name without touching the engine's loaders.
"""

from blink_core.model_store.registry import (
    PINNED_MODELS,
    ModelStoreError,
    PinnedModel,
    blink_home,
    fetch,
    file_sha256,
    resolve,
    stored_path,
)

__all__ = [
    "PINNED_MODELS",
    "ModelStoreError",
    "PinnedModel",
    "blink_home",
    "fetch",
    "file_sha256",
    "resolve",
    "stored_path",
]
