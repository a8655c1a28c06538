"""Typed view of ``thresholds.yaml``, with the digest that a certificate carries (design section 9)."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

DEFAULT_PATH = Path(__file__).with_name("thresholds.yaml")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Percentile = Annotated[float, Field(ge=50, lt=100)]
Count = Annotated[int, Field(ge=1)]


class ThresholdError(ValueError):
    """The thresholds file is missing, is not YAML, or has a value outside its range."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TieLimit(_Strict):
    maximum: Annotated[int, Field(ge=0)]
    per_rows: Count

    def allowed(self, rows: int) -> int:
        """Ties allowed among ``rows`` rows: ``maximum`` for each started block of ``per_rows``."""
        return self.maximum * -(-rows // self.per_rows)


class KVThresholds(_Strict):
    rms_factor: Positive
    reference_percentile: Percentile
    min_rows: Count
    confidence: Fraction


class TokenThresholds(KVThresholds):
    regret_factor: Positive
    ties: TieLimit


class SamplingThresholds(_Strict):
    near: Fraction
    near_logit: Fraction
    excused: TieLimit
    logprob_tolerance: Fraction
    repeated_tolerance: Fraction
    error_rate: Fraction


class TinyModelThresholds(_Strict):
    margin_factor: Positive
    min_kill_fraction: Annotated[float, Field(gt=0, le=1)]
    max_seeds: Count


class Thresholds(_Strict):
    """All registered limits. ``digest`` is the SHA-256 of the file's bytes, in hexadecimal."""

    version: Annotated[int, Field(ge=1, le=1)]
    tokens: TokenThresholds
    kv: KVThresholds
    sampling: SamplingThresholds
    tiny_models: TinyModelThresholds
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def load_thresholds(path: Path = DEFAULT_PATH) -> Thresholds:
    """Read and validate ``path``; raises ``ThresholdError`` with the file and the offending field."""
    try:
        data = path.read_bytes()
        values = yaml.safe_load(data)
        if not isinstance(values, dict):
            raise ThresholdError(f"{path}: expected a mapping, found {type(values).__name__}")
        if "digest" in values:
            raise ThresholdError(f"{path}: 'digest' is computed from the file and must not stand in it")
        return Thresholds.model_validate({**values, "digest": hashlib.sha256(data).hexdigest()})
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ThresholdError(f"{path}: {error}") from error


@cache
def default_thresholds() -> Thresholds:
    """The registered thresholds that ship with the suite."""
    return load_thresholds()
