"""The suite's sampler against HuggingFace's logits processors, which state the same published rules independently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verification.oracles.sampler import SampledRow, distribution

VOCAB = 50
EOS = (3, 17)


def huggingface(row: SampledRow) -> Any:
    """float64 [V], by the processors in the order of the design (HuggingFace's own order differs)."""
    steps: list[Any] = []
    if row.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[token], float(np.float32(b))] for token, b in row.logit_bias]))
    if row.min_tokens:
        steps.append(MinNewTokensLengthLogitsProcessor(len(row.prompt), row.min_tokens, [*row.eos, *row.stop_ids]))
    if row.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(float(np.float32(row.repetition_penalty))))
    steps.append(TemperatureLogitsWarper(float(np.float32(row.temperature))))
    if row.top_k:
        steps.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        steps.append(TopPLogitsWarper(float(np.float32(row.top_p))))
    if row.min_p:
        steps.append(MinPLogitsWarper(float(np.float32(row.min_p))))
    ids = torch.tensor([[*row.prompt, *row.output]])
    scores = torch.tensor(row.logits, dtype=torch.float64)[None]
    return torch.softmax(LogitsProcessorList(steps)(ids, scores), -1)[0].numpy()


@pytest.mark.parametrize("seed", range(120))
def test_distribution_is_huggingface_s(seed: int) -> None:
    """Catches: a rule that the suite and the engine misread alike. Presence and frequency, which HuggingFace lacks,
    have hand-made cases in the sampler's own tests."""
    rng = np.random.default_rng(seed)

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.6 else otherwise

    biased = rng.choice(VOCAB, 4, replace=False).tolist()
    row = SampledRow(
        logits=rng.normal(0, 2.5, VOCAB).astype(np.float32),
        token=-1,
        temperature=float(rng.choice([0.4, 1.0, 1.7])),
        top_p=maybe(float(rng.choice([0.2, 0.7, 0.95])), 1.0),
        seed=0,
        choice=0,
        position=0,
        top_k=maybe(int(rng.choice([1, 4, 25, 50])), 0),
        min_p=maybe(float(rng.choice([0.01, 0.2, 0.9])), 0.0),
        repetition_penalty=maybe(float(rng.choice([0.7, 1.2, 3.0])), 1.0),
        prompt=tuple(rng.integers(0, VOCAB, 7).tolist()),
        output=tuple(rng.integers(0, VOCAB, 5).tolist()),
        logit_bias=maybe(tuple((token, float(rng.choice([-100, -2.5, 3]))) for token in biased), ()),
        min_tokens=maybe(int(rng.choice([1, 5, 6])), 0),
        stop_ids=(8,),
        eos=EOS,
    )
    np.testing.assert_allclose(distribution(row), huggingface(row), rtol=1e-9, atol=1e-12)
