"""Drawn tokens follow the distributions that their logits and parameters give, and hang on nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from blink_core.abi.params import SamplingParams
from verification.certificate.report import P_VALUE
from verification.fixtures import Judge, Subject
from verification.oracles.sampler import distribution
from verification.oracles.sampler_statistics import independence, pooled_cells, uniform_scores, uniformity
from verification.program import Program, RequestSpec
from verification.properties import token_equivalence
from verification.result import CheckResult, Measurement, Verdict
from verification.run_context import RunContext
from verification.suite.running import serve

pytestmark = [pytest.mark.blink_property("token-equivalence"), pytest.mark.capability("cpu", "shared-memory", "oracle")]

NEW = 40
REQUESTS = 6  # of a program
PROGRAMS = {"smoke": 4, "nightly": 40, "full": 100}
TEMPERATURES = (0.7, 1.0, 1.5)


def test_drawn_distribution(tiny: Subject, judge: Judge, blink_run: RunContext, seed: int) -> None:
    """Many tokens drawn at several temperatures, each with its row's own distribution by the captured logits: pooled
    cells, uniformity, independence of one token and the next, and of two requests that ran together.

    Catches: a sampler that draws the rule's token in most rows and not in all, a bias, numbers that two rows share.
    """
    rng = random.Random(seed)
    capture, limits = tiny.rig.descriptor.capture, tiny.thresholds
    assert capture is not None
    vocab = tiny.oracles[1].vocab_size
    scores: list[np.ndarray] = []
    distributions, tokens = [], []
    for number in range(PROGRAMS[blink_run.profile_name]):
        specs = []
        for index in range(REQUESTS):
            prompt = tuple(rng.randrange(vocab) for _ in range(rng.randint(4, 20)))
            params = SamplingParams(
                NEW, temperature=TEMPERATURES[index % 3], seed=rng.getrandbits(64), choice=index % 2, ignore_eos=True
            )
            specs.append(RequestSpec(prompt, params))
        history = serve(tiny, Program(tuple(specs)), judge)
        records = token_equivalence.read_window(Path(capture), vocab, history.capture)
        rows, result = token_equivalence.index_capture(records, vocab)
        judge(result, history)
        judge(token_equivalence.check_capture(history, rows), history)
        drawn = token_equivalence.sampled_rows(history, rows, tiny.eos_ids)
        own = [(distribution(row), row.token) for row in drawn]
        distributions += [p for p, _ in own]
        tokens += [token for _, token in own]
        scores.append(uniform_scores([p for p, _ in own], [t for _, t in own], seed + number))
    everything = np.concatenate(scores)
    lanes = [one.reshape(REQUESTS, NEW) for one in scores if one.size == REQUESTS * NEW]
    serial = np.concatenate([lane[:, 0::2].reshape(-1) for lane in lanes])
    after = np.concatenate([lane[:, 1::2].reshape(-1) for lane in lanes])
    beside = np.concatenate([lane[0::2].reshape(-1) for lane in lanes])
    besides = np.concatenate([lane[1::2].reshape(-1) for lane in lanes])
    found = {
        "pooled cells": (pooled_cells(distributions, tokens), len(tokens)),
        "uniformity": (uniformity(everything), len(everything)),
        "a token and the next": (independence(serial, after), len(serial)),
        "two requests": (independence(beside, besides), len(beside)),
    }
    least = limits.evidence.drawn_tokens
    measured = {
        f"drawn tokens: {name}": Measurement(p, P_VALUE, limits.sampling.error_rate, n, "min")
        for name, (p, n) in found.items()
    }
    wrong = [name for name, (p, _) in found.items() if not p >= limits.sampling.error_rate]
    few = [name for name, (_, n) in found.items() if n < least]
    verdict = Verdict.INVALID if wrong else Verdict.UNKNOWN if few else Verdict.VALID
    message = f"{len(tokens)} drawn tokens: p below {limits.sampling.error_rate:g} in {wrong or 'no test'}"
    if few:
        message += f"; fewer than {least} draws behind {few}"
    judge(CheckResult(verdict, token_equivalence.PROPERTY, "distribution", message, {}, measured))
