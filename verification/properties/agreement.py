"""Agreement: the same programs on two rigs, builds, sizes or oracles give the same answers (design section 9).

Clauses:
  programs      both sides ran the same programs
  outcome       every request ended alike on both sides
  tokens        tokens are equal up to a first difference that is a tie: HuggingFace's logits behind the same context
                leave either token possible, by the regret of `criterion.tokens` against the row's measured error bound,
                or for a drawn token by the sampling rule with logits that far off. What follows a tie has another
                context and is not compared.
  alternatives  the most probable tokens listed beside a token are the same ones in the same order, wherever the context
                is the same. A difference is a tie if each list is one that HuggingFace's logits leave possible: the
                regret of every listed id against the best one that is not listed before it is within the same bound.
                The tokens behind a tie have the same context and are compared.
  ties          no more ties than registered: of tokens for the tokens compared, of lists for the ids compared
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verification.canonical import Answer, program_digest
from verification.oracles.hf import HFOracle
from verification.oracles.sampler import Agreement, adjusted, compare, raw_greedy
from verification.program import Program, RequestSpec
from verification.properties.token_equivalence import row_of
from verification.result import CheckResult, Measurement, Verdict
from verification.thresholds import Thresholds

PROPERTY = "cross-rig-agreement"
Oracles = tuple[HFOracle, HFOracle]


@dataclass(frozen=True, slots=True)
class Ran:
    """One program and what its requests got."""

    program: Program
    answers: tuple[Answer, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "digest": program_digest(self.program),
            "program": self.program.to_json(),
            "answers": [answer.to_json() for answer in self.answers],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ran:
        """What `to_json` gave; raises KeyError, TypeError or ValueError for anything else."""
        program = Program.from_json(data["program"])
        if program_digest(program) != data["digest"]:
            raise ValueError(f"the program is not the one of digest {data['digest']}")
        return cls(program, tuple(Answer.from_json(one) for one in data["answers"]))


def check(
    ours: Sequence[Ran],
    theirs: Sequence[Ran],
    *,
    oracles: Oracles | None = None,
    limits: Thresholds | None = None,
    names: tuple[str, str] = ("this", "other"),
    property_name: str = PROPERTY,
) -> CheckResult:
    """All clauses. oracles, limits: what decides ties; without them, and in batch-invariant mode, nothing is a tie."""
    if [program_digest(r.program) for r in ours] != [program_digest(r.program) for r in theirs]:
        message = f"{names[0]} ran {len(ours)} programs and {names[1]} {len(theirs)}, which are not the same ones"
        return CheckResult(Verdict.UNKNOWN, property_name, "programs", message)
    counts = Counter[str]()
    tied = _Ties(oracles, limits)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(one.answers, other.answers, strict=True):
            wrong = _compare(one.program.requests[a.request], a, b, tied, counts, names)
            if wrong is not None:
                clause, index, what = wrong
                where: dict[str, Any] = {"program": number, "request": a.request, "index": index}
                message = f"request {a.request} of program {number}: {what}"
                return CheckResult(Verdict.INVALID, property_name, clause, message, where)
    compared, listed = counts["tokens"], counts["listed"]
    ties, list_ties = counts["ties"], counts["list ties"]
    allowed, list_allowed = (0 if limits is None else limits.tokens.ties.allowed(n) for n in (compared, listed))
    measured = {
        "tokens_compared": Measurement(compared, "tokens"),
        "ties_between": Measurement(ties, "tokens", allowed, compared),
        "alternatives_compared": Measurement(listed, "tokens"),
        "ties_of_alternatives": Measurement(list_ties, "lists", list_allowed, listed),
    }
    if compared == 0:
        return CheckResult(Verdict.UNKNOWN, property_name, "tokens", "no token was compared", {}, measured)
    message = (
        f"{len(ours)} programs: {compared} tokens and {listed} alternatives agree between {names[0]} and {names[1]}, "
        f"{ties} and {list_ties} ties"
    )
    if ties > allowed or list_ties > list_allowed:
        message += f", at most {allowed} and {list_allowed} registered"
        return CheckResult(Verdict.INVALID, property_name, "ties", message, {}, measured)
    return CheckResult(Verdict.VALID, property_name, "tokens", message, {}, measured)


def _compare(
    spec: RequestSpec, a: Answer, b: Answer, tied: _Ties, counts: Counter[str], names: tuple[str, str]
) -> tuple[str, int, str] | None:
    """Clause, index and message of the first disagreement; counts what was compared and what was a tie."""
    end = min(len(a.tokens), len(b.tokens))
    first = next((i for i in range(end) if a.tokens[i] != b.tokens[i]), end)
    lists = [_by_token(answer, spec.params.logprobs) for answer in (a, b)]
    if a.alternatives == b.alternatives and None in lists:  # of a cancelled request: none were kept
        lists = [[], []]
    for answer, its, name in zip((a, b), lists, names, strict=True):
        if its is None and end == len(a.tokens) == len(b.tokens) and a.outcome == b.outcome:
            wanted = f"{spec.params.logprobs} to each of {len(answer.tokens)} tokens"
            return (
                "alternatives",
                end,
                f"{sum(map(len, answer.alternatives))} alternatives on {name}, asked for {wanted}",
            )
    for index, (x, y) in enumerate(zip(*(its or [] for its in lists), strict=False)):
        if index > first:
            break
        counts["listed"] += len(x)
        if x == y:
            continue
        if not tied.lists(spec, a.tokens[:index], (x, y)):
            told = f"{list(x)} on {names[0]} and {list(y)} on {names[1]}"
            return "alternatives", index, f"alternatives of token {index} are {told}, and that is no tie"
        counts["list ties"] += 1
    counts["tokens"] += first
    if first < end:
        if not tied.tokens(spec, a.tokens[:first], (a.tokens[first], b.tokens[first])):
            told = f"{a.tokens[first]} on {names[0]} and {b.tokens[first]} on {names[1]}"
            return "tokens", first, f"token {first} is {told}, and that is no tie"
        counts["ties"] += 1
    elif len(a.tokens) != len(b.tokens) or a.outcome != b.outcome:
        return "outcome", first, f"{_told(a)} on {names[0]}, {_told(b)} on {names[1]}"
    return None


def _by_token(answer: Answer, count: int) -> list[tuple[int, ...]] | None:
    """The alternatives of each token, `count` of them; None where there are more or fewer. An event carries a few."""
    ids = [token for event in answer.alternatives for token in event]
    if len(ids) != count * len(answer.tokens):
        return None
    return [tuple(ids[i * count : (i + 1) * count]) for i in range(len(answer.tokens))] if count else []


def _told(answer: Answer) -> str:
    return f"{answer.outcome} after {len(answer.tokens)} tokens"


@dataclass(frozen=True, slots=True)
class _Ties:
    """Decides ties by HuggingFace's logits; without oracles or limits nothing is one."""

    oracles: Oracles | None
    limits: Thresholds | None

    def _row(self, spec: RequestSpec, before: Sequence[int]) -> tuple[NDArray[np.float32], float, Thresholds] | None:
        """Float32 logits [V] behind a context, and the bound of a regret: the row's own error, times the factor."""
        if self.oracles is None or self.limits is None:
            return None
        ids = [*spec.prompt, *before]
        reference, ordinary = (oracle.teacher_force(ids, start=len(ids) - 1)[0] for oracle in self.oracles)
        error = float(np.abs(ordinary.astype(np.float64) - reference).max())
        return ordinary, self.limits.tokens.regret_factor * error, self.limits

    def tokens(self, spec: RequestSpec, before: Sequence[int], pair: tuple[int, int]) -> bool:
        """Whether either token may come behind `before`."""
        found = self._row(spec, before)
        if found is None or self.oracles is None:
            return False
        ordinary, bound, limits = found
        if not all(0 <= token < len(ordinary) for token in pair):
            return False
        row = row_of(spec, before, ordinary, 0, self.oracles[1].eos_token_ids)
        if raw_greedy(row):
            return all(_regret(ordinary, token) <= bound for token in pair)
        if row.temperature == 0:
            scale = max(1.0, row.repetition_penalty, 1 / row.repetition_penalty)  # of an error in a logit
            return all(_regret(adjusted(row), token) <= bound * scale for token in pair)
        # An error of `bound` in a logit moves a candidate's place in the race by this much, in relation.
        near = min(0.5, max(limits.sampling.near, float(np.expm1(bound / row.temperature))))
        loose = limits.sampling.model_copy(update={"near": near})
        return all(compare(replace(row, token=token), loose)[1] is not Agreement.WRONG for token in pair)

    def lists(self, spec: RequestSpec, before: Sequence[int], pair: tuple[Sequence[int], Sequence[int]]) -> bool:
        """Whether either list may be the most probable ids behind `before`, by the raw logits, the best first."""
        found = self._row(spec, before)
        if found is None:
            return False
        ordinary, bound, _ = found
        for ids in pair:
            left = ordinary.astype(np.float64)
            for token in ids:
                if not (0 <= token < len(left) and _regret(left, token) <= bound):
                    return False
                left[token] = -np.inf  # a second time it has no place
        return True


def _regret(logits: NDArray[Any], token: int) -> float:
    """How far a token's logit is below the best; inf for one that is not to be chosen."""
    return float(logits.max() - logits[token]) if logits[token] > -np.inf else float("inf")
