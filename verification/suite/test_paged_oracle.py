"""HuggingFace's own continuous batching over a paged cache, as a second oracle."""

from __future__ import annotations

import random

import pytest

from blink_core.abi.params import SamplingParams
from verification.canonical import Answer, answers
from verification.fixtures import Judge, Subject
from verification.oracles.hf_paged import PagedOracle, PagedSizes
from verification.plugin_session import leave_out
from verification.program import Program, RequestSpec
from verification.properties import agreement, token_equivalence
from verification.suite.running import serve
from verification.suite.test_boundaries import lengths_near_pages

pytestmark = [pytest.mark.blink_property("token-equivalence"), pytest.mark.capability("cpu", "shared-memory", "oracle")]

NEW = 12
DEADLINE_S = 600.0


def _check(subject: Subject, judge: Judge, prompts: list[tuple[int, ...]], sizes: PagedSizes) -> None:
    """The same greedy requests through the engine and through transformers' batches of them."""
    assert subject.rig.model is not None
    params = SamplingParams(NEW, ignore_eos=True)
    program = Program(tuple(RequestSpec(prompt, params) for prompt in prompts))
    history = serve(subject, program, judge)
    paged = PagedOracle.load(subject.rig.model)
    tokens = paged.generate(prompts, [NEW] * len(prompts), sizes=sizes, deadline_s=DEADLINE_S)
    theirs = tuple(Answer(i, "FINISH LENGTH", tuple(ids)) for i, ids in enumerate(tokens))
    result = agreement.check(
        [agreement.Ran(program, tuple(answers(history)))],
        [agreement.Ran(program, theirs)],
        oracles=subject.oracles,
        limits=subject.thresholds,
        names=("the engine", "transformers' continuous batching"),
        property_name=token_equivalence.PROPERTY,
    )
    judge(result, history)


@pytest.mark.blink_profile("nightly", "full")
def test_paged_oracle(request: pytest.FixtureRequest, family: Subject, judge: Judge, seed: int) -> None:
    """Greedy requests of each family, some of which begin alike, through the engine and through HuggingFace's paged
    batches, in a pool so small that it must wait for blocks.

    Catches: a fault that the engine shares with HuggingFace's plain forward pass, and one of batches or paging.
    """
    _skip_long_rope(family, request)
    _check(family, judge, _prompts(family, seed), PagedSizes(blocks=14))


def test_paged_oracle_of_one(tiny: Subject, judge: Judge, seed: int) -> None:
    """The same for one model in every profile.

    Catches: the same, one family's worth of it.
    """
    _check(tiny, judge, _prompts(tiny, seed), PagedSizes(blocks=14))


@pytest.mark.blink_profile("nightly", "full")
def test_paged_oracle_of_model_under_test(
    request: pytest.FixtureRequest, engine: Subject, judge: Judge, seed: int
) -> None:
    """A few real prompts on the real model.

    Catches: the same, with weights whose margins nobody has chosen.
    """
    _skip_long_rope(engine, request)
    _check(engine, judge, [tuple(ids) for ids in engine.texts[:3]], PagedSizes(blocks=40, batch_tokens=64))


def _prompts(subject: Subject, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    size = subject.rig.descriptor.config.page_size
    prompts = [tuple(rng.randrange(3, subject.shape.vocab) for _ in range(n)) for n in lengths_near_pages(size)]
    return [*prompts, prompts[-1][:size] + prompts[0][:3], prompts[-1]]


def _skip_long_rope(subject: Subject, request: pytest.FixtureRequest) -> None:
    if subject.oracles[1].rope_switch is not None:
        leave_out(request.node, "LongRoPE: transformers' batches mix frequencies of short and long sequences")
