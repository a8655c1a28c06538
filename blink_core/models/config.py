"""What the engine knows of a model: shape, constants, rotary embedding, windows, experts (design section 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from blink_core.models.errors import ModelError
from blink_core.ops.rope import (
    factored_frequencies,
    inverse_frequencies,
    llama3_frequencies,
    yarn_frequencies,
)

MAX_DIMENSION = 1 << 24  # no real size comes near; products of two still fit 64 bits

F32 = npt.NDArray[np.float32]
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "factors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of ``dim`` elements of each head, and its scaling.

    Kind ``factors`` is a table of divisors of the frequencies, ``short_factor``, as GGUF files carry it. LongRoPE has
    two: ``short_factor`` for sequences up to ``original_max`` positions, ``long_factor`` beyond. ``attention_factor``
    multiplies cosines and sines.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max: int | None = None
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.dim <= MAX_DIMENSION or self.dim % 2:
            raise ModelError(f"{self.dim} rotated elements a head, rotary embedding needs an even positive number")
        numbers = (
            "theta",
            "factor",
            "attention_factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
        )
        for name in numbers:
            if not 0 < (number := getattr(self, name)) < math.inf:
                raise ModelError(f"rope_{name} is {number}, expected a positive finite number")
        if self.kind in ("llama3", "yarn", "longrope") and not 1 < (self.original_max or 0) <= MAX_DIMENSION:
            raise ModelError(f"RoPE scaling {self.kind!r} has original_max_position_embeddings {self.original_max}")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ModelError(
                f"low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )
        if self.kind == "yarn" and self.theta <= 1:
            raise ModelError(f"rope_theta is {self.theta}, RoPE scaling 'yarn' needs more than 1")
        tables = {"longrope": ("short_factor", "long_factor"), "factors": ("short_factor",)}.get(self.kind, ())
        for name in tables:
            table = getattr(self, name)
            if len(table) != self.dim // 2 or not all(0 < f < math.inf for f in table):
                raise ModelError(f"RoPE {name} has {len(table)} values, expected {self.dim // 2} positive finite ones")

    def frequencies(self, *, long: bool = False) -> F32:
        """Inverse frequencies float32 [dim/2]; ``long``: those of LongRoPE beyond ``original_max``."""
        if self.kind in ("longrope", "factors"):
            table = self.long_factor if long else self.short_factor
            return factored_frequencies(self.theta, self.dim, np.array(table, np.float32))
        if self.kind == "yarn":
            return yarn_frequencies(
                self.theta,
                self.dim,
                self.factor,
                self.original_max or 0,
                self.beta_fast,
                self.beta_slow,
                truncate=self.truncate,
            )
        plain = inverse_frequencies(self.theta, self.dim)
        if self.kind == "linear":
            return plain / np.float32(self.factor)
        if self.kind == "llama3":
            return llama3_frequencies(
                plain, self.factor, self.low_freq_factor, self.high_freq_factor, self.original_max or 0
            )
        return plain


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Mixture of experts: each token takes ``top_k`` of ``count`` experts of ``intermediate_size`` in the layers
    ``layers``; ``normalize``: their weights sum to one."""

    count: int
    top_k: int
    intermediate_size: int
    normalize: bool
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("count", "intermediate_size"):
            if not 0 < (value := getattr(self, name)) <= MAX_DIMENSION:
                raise ModelError(f"number of experts or their size ({name}) is {value}, expected 1 to {MAX_DIMENSION}")
        if not 1 <= self.top_k <= self.count:
            raise ModelError(f"num_experts_per_tok is {self.top_k}, expected 1 to the {self.count} experts there are")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a model; all sizes in elements.

    ``architecture`` is HuggingFace's ``model_type``. ``windows`` has for each layer the number of positions that a
    query sees (its own included), None for all; empty means None everywhere. ``eos_token_ids`` is the union of what the
    configuration, the generation configuration and the tokenizer name, ascending. Raises ModelError if the values do
    not fit each other.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    experts: ExpertConfig | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and not 0 < value <= MAX_DIMENSION:
                raise ModelError(f"{field.name} is {value}, expected 1 to {MAX_DIMENSION}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.rope.dim > self.head_dim:
            raise ModelError(f"{self.rope.dim} rotated elements a head, but head_dim is {self.head_dim}")
        if not 0 < self.rms_norm_eps < math.inf:
            raise ModelError(f"rms_norm_eps is {self.rms_norm_eps}, expected a positive finite number")
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelError(f"{len(self.windows)} attention windows for {self.num_layers} layers")
        for window in self.windows:
            if window is not None and window < 1:
                raise ModelError(f"sliding_window is {window}, expected at least 1")
        for token in self.eos_token_ids if self.bos_token_id is None else (*self.eos_token_ids, self.bos_token_id):
            if not 0 <= token < self.vocab_size:
                raise ModelError(f"special token id {token} is outside the vocabulary of {self.vocab_size}")

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return self.rope.theta

    def keys_are_final(self, max_len: int) -> bool:
        """Whether, in sequences of up to ``max_len`` tokens, a token's keys depend on nothing that comes after it.

        Not with LongRoPE beyond its original maximum: a sequence that outgrows it has all its keys computed anew, so
        its pages cannot be shared with a shorter one.
        """
        return self.rope.kind != "longrope" or max_len <= (self.rope.original_max or 0)
