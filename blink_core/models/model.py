"""A loaded model: its configuration and its network (design section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blink_core.models.batch import KVPool, StepBatch, validate_step
from blink_core.models.config import ModelConfig
from blink_core.models.layers import Decoder
from blink_core.models.load_config import load_config
from blink_core.models.loaders import WeightReader, open_source
from blink_core.models.registry import FAMILIES
from blink_core.ops.numpy_ops import F32, NumpyOps


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. Not safe for concurrent calls of ``forward``."""

    config: ModelConfig
    batch_invariant: bool
    network: Decoder

    def forward(self, batch: StepBatch, kv: KVPool) -> F32:
        """Run one step: write keys and values of the new tokens into ``kv``, return logits float32 [S, vocab].

        Raises StepBatchError, before anything is written, if the batch does not fit the model or the pool.
        """
        validate_step(batch, kv, self.config)
        if batch.token_ids.size == 0:
            return np.empty((0, self.config.vocab_size), dtype=np.float32)
        return self.network.forward(batch, kv)


def load_model(path: str | Path, *, batch_invariant: bool = False, ops: NumpyOps | None = None) -> Model:
    """Load a ``.gguf`` file or a HuggingFace directory as float32 NumPy arrays.

    Tensors are mapped and decoded a block at a time straight into their final place, so loading takes little memory
    beyond the weights. ``batch_invariant`` selects the mode of :class:`~blink_core.ops.numpy_ops.NumpyOps` and checks
    that this machine's BLAS supports it. ``ops``: operations of that same mode that the model shall run, by default
    plain ones. Raises ModelError (also for truncated files, for missing, unexpected or misshapen tensors, and for
    weights that are not finite) or its subclass BatchInvarianceError.
    """
    if ops is not None and ops.batch_invariant != batch_invariant:
        raise ValueError(f"batch_invariant is {batch_invariant}, that of the given operations {ops.batch_invariant}")
    path = Path(path)
    config = load_config(path)
    family = FAMILIES[config.architecture]
    reader = WeightReader(open_source(path, family, config))
    network = family.network(config, reader, ops or NumpyOps(batch_invariant=batch_invariant))
    reader.finish()
    return Model(config, batch_invariant, network)
