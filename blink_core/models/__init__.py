"""Model configuration, loaders and forward passes of the engine (design section 7)."""

from blink_core.models.batch import KVPool, StepBatch
from blink_core.models.config import ModelConfig
from blink_core.models.errors import BatchInvarianceError, ModelError, StepBatchError
from blink_core.models.load_config import load_config
from blink_core.models.model import Model, load_model

__all__ = [
    "BatchInvarianceError",
    "KVPool",
    "Model",
    "ModelConfig",
    "ModelError",
    "StepBatch",
    "StepBatchError",
    "load_config",
    "load_model",
]
