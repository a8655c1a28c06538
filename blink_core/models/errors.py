"""Errors of model loading and execution (design section 7)."""

from __future__ import annotations


class ModelError(Exception):
    """A model, its files or a step batch cannot be used; the message names the item, the value and the limit."""


class StepBatchError(ModelError):
    """A :class:`blink_core.models.model.StepBatch` does not fit the model or the KV pool."""


class BatchInvarianceError(ModelError):
    """This machine's BLAS gives a row of a fixed-size GEMM different bits by position or neighbours."""
