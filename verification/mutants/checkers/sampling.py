"""Choosing tokens: the rule in float64, HuggingFace's processors, log probabilities, and what a draw may depend on."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blink_core.abi.params import SamplingParams
from verification.history import History
from verification.mutants.checkers.base import Checker, Finding, Product, found
from verification.mutants.engines import greedy, parts_of, run, stepped
from verification.mutants.references import ENDLESS, model_path, remembered
from verification.oracles.sampler import Agreement, SampledRow, compare, is_plain
from verification.program import RequestSpec
from verification.properties.log_probabilities import check_log_probabilities
from verification.result import Verdict
from verification.sampling_draw import draw_sampling
from verification.thresholds import default_thresholds

MODEL = "mistral-full"
VOCAB, EOS = 512, (2,)
FAILED = "a request failed"
Rows = dict[tuple[int, int, int, int], dict[str, Any]]


def draw_requests(seed: int) -> list[RequestSpec]:
    """Greedy and hot requests with every parameter; more than there are slots, so that slots are used again.

    Some can show one fault each: stop ids that only a bar keeps from being chosen, penalties of tokens that come again,
    alternatives in their order, biases behind others of the same slot.
    """
    rng = random.Random(f"sampling-{seed}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    fields: list[dict[str, Any]] = []
    for stop in ids(3):
        fields.append({"stop_token_ids": (stop,), "logit_bias": ((stop, 60.0),), "min_tokens": 3})
    hots: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.9}]
    for hot in hots:
        fields.append({"repetition_penalty": 2.5, **hot})
        fields.append({"repetition_penalty": 0.6, **hot})
        fields.append({"presence_penalty": 2.0, "frequency_penalty": 2.0, **hot})
        fields.append({"presence_penalty": -2.0, "frequency_penalty": -1.0, **hot})
    cuts: list[dict[str, Any]] = [{"top_k": 20, "top_p": 0.6}, {"min_p": 0.2}, {"top_k": 3}]
    fields += [{"temperature": 1.5, **cut} for cut in (*cuts, {"min_p": 0.05, "top_p": 0.8})]
    fields += [{"logit_bias": ((token, 6.0),)} for token in ids(6)]
    fields += [{"logprobs": 5, **hot} for hot in hots[:2]]
    fields += [draw_sampling(rng, VOCAB, 8, hot=rng.random() < 0.7) for _ in range(12)]
    rng.shuffle(fields)
    # First each slot has a request with many biases: what is left of them must not count for those that follow.
    fields = [{"logit_bias": tuple((token, 9.0) for token in dict.fromkeys(ids(8)))} for _ in range(8)] + fields
    drawn = []
    for index, given in enumerate(fields):
        prompt = ids(rng.choice((1, 5, 9, 17)))
        params = SamplingParams(8, seed=rng.getrandbits(64), ignore_eos=True, **given)
        drawn.append(RequestSpec(tuple(prompt), params, after=rng.choice((0, 0, 6 * index))))
    return drawn


def serve(product: Product, seed: int, deadline: float) -> tuple[History, Rows]:
    """The requests of a seed as they were served, and the engine's own logits by ring, slot, generation, position."""
    parts = parts_of(product, deadline)
    sizes = {"slots": 8, "max_rows": 6, "token_budget": 24, "sq_entries": 32}
    with stepped(parts, product.scratch, model_path(MODEL), **sizes) as engine:
        result, history = run(engine, draw_requests(seed))
    rows: Rows = {}
    for spec, one in zip(history.program.requests, result["requests"], strict=True):
        for index, token in enumerate(one["tokens"] if one and one["logits"] is not None else ()):
            key = 0, one["slot"], one["generation"], len(spec.prompt) + index
            rows[key] = {"logits": one["logits"][index], "token": token}
    return history, rows


@dataclass(frozen=True)
class RuleChecker:
    """Every token is the one that parameters and seed give on the engine's own logits (`oracles.sampler`)."""

    name: str = "sampler-rule"
    functions: frozenset[str] = frozenset({"verification.oracles.sampler.compare"})
    where: frozenset[str] = frozenset({"python"})
    clauses: Mapping[str, frozenset[str]] = field(
        default_factory=lambda: {
            "token": frozenset("LVS"),
            "delivered": frozenset("SR"),
            FAILED: frozenset("LS"),
        }
    )
    seconds: float = 30.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """The first token that is another one."""
        history, rows = serve(product, seed, deadline)
        if not history.complete or any(not history.tokens_of(s) for s in history.submitted):
            return found(self, FAILED, "a request has no tokens")
        if (lost := next((s.request for s in history.submitted if not _covered(history, s, rows)), None)) is not None:
            return found(self, "delivered", f"request {lost} was delivered tokens that were not sampled for it")
        for row in sampled(history, rows):
            expected, agreement = compare(row, default_thresholds().sampling)
            if agreement is Agreement.WRONG:
                told = {name: getattr(row, name) for name in ("position", "temperature", "top_k", "top_p", "min_p")}
                return found(self, "token", f"token {row.token}, the rule gives {expected}: {told}, seed {row.seed}")
        return None


@dataclass(frozen=True)
class LogprobChecker:
    """Log probabilities of tokens and alternatives against a log softmax in float64."""

    name: str = "log-probabilities"
    functions: frozenset[str] = frozenset({"verification.properties.log_probabilities.check_log_probabilities"})
    where: frozenset[str] = frozenset({"python"})
    clauses: Mapping[str, frozenset[str]] = field(default_factory=lambda: {"logprob": frozenset("LR")})
    seconds: float = 30.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """What `check_log_probabilities` found."""
        history, rows = serve(product, seed, deadline)
        keep = [s for s in history.submitted if _covered(history, s, rows)]
        history.submitted[:] = keep
        tolerance = default_thresholds().sampling.logprob_tolerance
        result = check_log_probabilities(history, rows, tolerance)  # type: ignore[arg-type]
        return found(self, "logprob", str(result)) if result.verdict is Verdict.INVALID else None


def sampled(history: History, rows: Rows) -> Iterator[SampledRow]:
    """Rows of the tokens delivered whose raw logits' argmax alone does not decide."""
    for s in history.submitted:
        spec, tokens = history.program.requests[s.request], history.tokens_of(s)
        p = spec.params
        for index, token in enumerate(tokens):
            position = len(spec.prompt) + index
            logits = rows[0, s.slot, s.generation, position]["logits"]
            row = SampledRow.of(p, logits, token, prompt=spec.prompt, output=tuple(tokens[:index]), eos=EOS)
            if p.temperature > 0 or not is_plain(row):
                yield row


def _covered(history: History, submitted: Any, rows: Rows) -> bool:
    start = len(history.program.requests[submitted.request].prompt)
    count = len(history.tokens_of(submitted))
    keys = [(0, submitted.slot, submitted.generation, start + i) for i in range(count)]
    return all(key in rows for key in keys)


@dataclass(frozen=True)
class DrawChecker:
    """What a draw may depend on: seed, choice, position; not slot, batch or neighbour."""

    name: str = "draws-metamorphic"
    functions: frozenset[str] = frozenset({"verification.mutants.checkers.sampling.judge_draws"})
    where: frozenset[str] = frozenset({"python"})
    clauses: Mapping[str, frozenset[str]] = field(
        default_factory=lambda: {"equal seeds draw alike": frozenset("LS"), "others draw apart": frozenset("LV")}
    )
    seconds: float = 30.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """One prompt in several slots, with one seed and with others."""
        rng = random.Random(f"draws-{seed}")
        prompt, own = [rng.randrange(3, VOCAB) for _ in range(7)], rng.getrandbits(64)
        hot: dict[str, Any] = {"temperature": 1.5, "ignore_eos": True}
        params = [SamplingParams(24, seed=own, **hot) for _ in range(3)]
        params += [SamplingParams(24, seed=own, choice=1, **hot), SamplingParams(24, seed=own ^ 1 << 40, **hot)]
        requests = [RequestSpec(tuple(prompt), p) for p in params]
        requests.insert(1, greedy([rng.randrange(3, VOCAB) for _ in range(20)], 9))
        requests.append(RequestSpec(tuple(prompt), params[0], ENDLESS))
        parts = parts_of(product, deadline)
        with stepped(parts, product.scratch, model_path(MODEL), batch_invariant=True) as engine:
            result, _ = run(engine, requests)
        tokens = [one["tokens"] if one else [] for one in result["requests"]]
        wrong = judge_draws(same=[tokens[i] for i in (0, 2, 3, 6)], others=[tokens[0], tokens[4], tokens[5]])
        return None if wrong is None else found(self, *wrong)


def judge_draws(same: list[list[int]], others: list[list[int]]) -> tuple[str, str] | None:
    """same: must be equal. others: must differ from each other: 24 tokens at temperature 1.5 are alike by no chance."""
    if any(tokens != same[0] for tokens in same):
        return "equal seeds draw alike", f"one seed gave {same}"
    if len({tuple(tokens) for tokens in others}) < len(others):
        return "others draw apart", f"other seeds and choices gave {others}"
    # One position's numbers serve one position: a race that repeats them would repeat its winner where it can.
    return None


NAN, CLOSED = 9, 10  # rows that may give no token
ERROR_RATE = 1e-7  # of one test of a distribution


@dataclass(frozen=True)
class ProcessorChecker:
    """Draws of one row with many seeds against HuggingFace's logits processors: what is kept, and how often."""

    name: str = "sampler-huggingface"
    functions: frozenset[str] = frozenset(
        {"verification.mutants.checkers.sampling.huggingface", "verification.oracles.sampler_statistics.pooled_cells"}
    )
    where: frozenset[str] = frozenset({"python"})
    clauses: Mapping[str, frozenset[str]] = field(
        default_factory=lambda: {"kept": frozenset("L"), "frequency": frozenset("L"), "status": frozenset("L")}
    )
    seconds: float = 60.0
    draws: int = 400

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """The first row whose draws HuggingFace's processors do not allow, or would give in other numbers."""
        from verification.oracles.sampler_statistics import pooled_cells  # loads scipy.stats

        rng = np.random.default_rng([seed, 17])
        parts = parts_of(product, deadline)
        for number in range(11):
            row = draw_row(rng, number)
            expected = (
                None
                if row["refused"]
                else np.array(remembered("sampler", told(row), functools.partial(huggingface, row)))
            )
            drawn = parts.keep("blink_core.ops.logits:SamplingRow", **row["fields"], seed=0, position=0)
            several = [
                parts.keep("dataclasses:replace", drawn, seed=int(s), position=int(s) % 97)
                for s in rng.integers(0, 2**63, self.draws)
            ]
            logits = np.repeat(row["logits"][None], self.draws, axis=0)
            result = parts.keep("blink_core.ops.sampling:sample", logits, several)
            tokens, status = result.call("tokens"), result.call("status")
            for part in several:
                parts.drop(part)
            if expected is None:
                if (tokens != -1).any() or (status == 0).any():
                    what = "with a NaN" if number == NAN else "whose every id is barred or masked"
                    return found(self, "status", f"a row {what} gave token {tokens.max()}, status {status.min()}")
                continue
            if (tokens < 0).any():
                return found(self, "status", f"no token was chosen (status {status.max()}) with {row['fields']}")
            outside = [int(t) for t in np.unique(tokens) if expected[t] == 0]
            if outside:
                return found(self, "kept", f"ids {outside[:5]} are not kept with {shown(row)}")
            chance = pooled_cells([expected] * self.draws, tokens.tolist())
            if chance < ERROR_RATE:
                return found(self, "frequency", f"chance {chance:.2g} of these draws with {shown(row)}")
        return None


def draw_row(rng: np.random.Generator, number: int) -> dict[str, Any]:
    """Logits with equals at every rank, and fields of a sampling row that change what is kept."""
    vocab = 60
    logits = np.repeat(rng.normal(0, 1.6, vocab // 3), 3).astype(np.float32)
    rng.shuffle(logits)
    likely = np.argsort(-logits, kind="stable").astype(np.int32)
    # Penalties are told by ids that matter: the prompt holds likely ones, the output others, and some are in both.
    prompt, output = likely[:5], np.concatenate((likely[3:9], likely[3:6], likely[4:5])).astype(np.int32)
    barred = rng.choice(vocab, 25, replace=False).astype(np.int32)
    closed = np.zeros(2, np.uint32)
    for token in barred[:9]:
        closed[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    choices: list[dict[str, Any]] = [
        {"temperature": 1.4, "top_k": int(rng.choice([4, 5, 7, 11]))},
        {"temperature": 1.4, "top_p": 0.6, "top_k": 13},
        {"top_p": float(rng.choice([0.35, 0.8]))},
        {"temperature": 1.4, "min_p": float(rng.choice([0.25, 0.5]))},
        {"repetition_penalty": 0.8, "prompt": prompt, "output": output},
        {"presence_penalty": 1.5, "frequency_penalty": 1.2, "prompt": prompt, "output": output},
        {"barred": barred},
        {"mask": rng.integers(0, 2**32, 2).astype(np.uint32)},
        {"bias_ids": np.array([3, 8, 20], np.int32), "bias": np.array([4.0, -3.0, 2.0], np.float32)},
        {},
        {"barred": barred, "mask": closed},
    ]
    if number == NAN:
        logits[int(rng.integers(1, vocab))] = np.nan
    elif number == 4:  # a penalty of ids that are negative, as all are
        logits -= 8
    elif number == 6:  # the barred ones would be chosen: nothing but the bar keeps them away
        logits[barred] += 200
    return {"logits": logits, "fields": {"temperature": 0.7} | choices[number], "refused": number in (NAN, CLOSED)}


def told(row: dict[str, Any]) -> dict[str, Any]:
    """Logits and fields as JSON has them."""
    arrays = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row["fields"].items()}
    return {"logits": row["logits"].tolist(), **arrays}


def shown(row: dict[str, Any]) -> str:
    """Fields without their arrays."""
    return str({k: v for k, v in row["fields"].items() if not isinstance(v, np.ndarray)} or list(row["fields"]))


def huggingface(row: dict[str, Any]) -> list[float]:
    """Probabilities float64 [vocab] by HuggingFace's processors in the design's order; ties at the edge of top_k and
    top_p, which HuggingFace leaves open, go to the lower id."""
    import torch
    import transformers

    f = row["fields"]
    scores = torch.tensor(np.nan_to_num(row["logits"]), dtype=torch.float64)[None]
    # Equals are told apart by their id: the order is the design's, and no probability changes by more than 1e-9.
    scores = scores - torch.arange(scores.shape[1], dtype=torch.float64) * 1e-10
    known = [*f.get("prompt", ()), *f.get("output", ())]
    ids = torch.tensor([[int(i) for i in known] or [0]])
    if "bias_ids" in f:
        bias = [[[int(i)], float(b)] for i, b in zip(f["bias_ids"], f["bias"], strict=True)]
        scores = transformers.SequenceBiasLogitsProcessor(bias)(ids, scores)
    if "mask" in f:
        allowed = [bool(int(f["mask"][i // 32]) >> (i % 32) & 1) for i in range(scores.shape[1])]
        scores[0, ~torch.tensor(allowed)] = -torch.inf
    if "barred" in f:
        barred = transformers.SuppressTokensLogitsProcessor([int(i) for i in f["barred"]])
        scores = barred(ids, scores)
    if "repetition_penalty" in f:
        scores = transformers.RepetitionPenaltyLogitsProcessor(f["repetition_penalty"])(ids, scores)
    if "presence_penalty" in f:  # HuggingFace has none: the OpenAI API's definition
        for token in f["output"]:
            scores[0, int(token)] -= f["frequency_penalty"]
        for token in set(f["output"].tolist()):
            scores[0, token] -= f["presence_penalty"]
    steps: list[Any] = [transformers.TemperatureLogitsWarper(f["temperature"])]
    steps += [transformers.TopKLogitsWarper(f["top_k"])] if "top_k" in f else []
    steps += [transformers.TopPLogitsWarper(f["top_p"])] if "top_p" in f else []
    steps += [transformers.MinPLogitsWarper(f["min_p"])] if "min_p" in f else []
    for step in steps:
        scores = step(ids, scores)
    result: list[float] = torch.softmax(scores, -1)[0].tolist()
    return result


CHECKERS: tuple[Checker, ...] = (RuleChecker(), ProcessorChecker(), LogprobChecker(), DrawChecker())
