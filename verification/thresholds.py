"""Typed view of ``thresholds.yaml``, with the digest that a certificate carries (design section 9)."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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


class KernelThresholds(_Strict):
    rms_ratio: Positive
    worst_row: Positive
    min_rows: Count


class SamplingThresholds(_Strict):
    near: Fraction
    near_logit: Fraction
    excused: TieLimit
    logprob_tolerance: Fraction
    repeated_tolerance: Fraction
    error_rate: Fraction


class StatisticsThresholds(_Strict):
    family_wise_error_rate: Fraction
    most_tests: Count


class EvidenceThresholds(_Strict):
    contested_turns: Count
    shared_requests: Count
    drawn_tokens: Count


class TesterThresholds(_Strict):
    found_within: Count
    shrunk_to: Count
    shrunk_to_requests: Count


class TinyModelThresholds(_Strict):
    margin_factor: Positive
    min_kill_fraction: Annotated[float, Field(gt=0, le=1)]
    max_seeds: Count


class MutantThresholds(_Strict):
    sample: Count
    least_killed: Annotated[float, Field(gt=0, le=1)]


class Thresholds(_Strict):
    """All registered limits. ``digest`` is the SHA-256 of the file's bytes, in hexadecimal."""

    version: Annotated[int, Field(ge=1, le=1)]
    tokens: TokenThresholds
    kv: KVThresholds
    kernels: KernelThresholds
    sampling: SamplingThresholds
    statistics: StatisticsThresholds
    evidence: EvidenceThresholds
    tester: TesterThresholds
    tiny_models: TinyModelThresholds
    mutants: MutantThresholds
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _family(self) -> Thresholds:
        each, most = self.sampling.error_rate, self.statistics.most_tests
        if each * most > self.statistics.family_wise_error_rate * (1 + 1e-9):
            raise ValueError(
                f"sampling.error_rate {each:g} in {most} tests is {each * most:g}, above the family-wise error rate "
                f"{self.statistics.family_wise_error_rate:g}"
            )
        return self


def load_thresholds(path: Path = DEFAULT_PATH) -> Thresholds:
    """Read and validate ``path``; raises ``ThresholdError`` with the file and the offending field."""
    try:
        return parse_thresholds(path.read_bytes(), str(path))
    except OSError as error:
        raise ThresholdError(f"{path}: {error}") from error


def parse_thresholds(data: bytes, source: str) -> Thresholds:
    """Validate the text of a thresholds file; raises ``ThresholdError`` with `source` and the offending field."""
    try:
        values = yaml.safe_load(data)
        if not isinstance(values, dict):
            raise ThresholdError(f"{source}: expected a mapping, found {type(values).__name__}")
        if "digest" in values:
            raise ThresholdError(f"{source}: 'digest' is computed from the file and must not stand in it")
        return Thresholds.model_validate({**values, "digest": hashlib.sha256(data).hexdigest()})
    except (yaml.YAMLError, ValidationError) as error:
        raise ThresholdError(f"{source}: {error}") from error


@cache
def default_thresholds() -> Thresholds:
    """The registered thresholds that ship with the suite."""
    return load_thresholds()
