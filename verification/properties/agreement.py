"""Agreement: the same programs on two rigs, builds, sizes or oracles give the same answers (design section 9).

Clauses:
  programs   both sides ran the same programs
  outcome    every request ended alike on both sides
  tokens     tokens are equal up to a first difference that is a tie: HuggingFace's logits behind the same context leave
             either token possible, by the regret of `criterion.tokens` against the row's measured error bound, or for
             a drawn token by the sampling rule with logits that far off. What follows a tie has another context and is
             not compared.
  ties       no more ties than registered
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verification.canonical import Answer, program_digest
from verification.oracles.hf import HFOracle
from verification.oracles.sampler import Agreement, SampledRow, adjusted, compare
from verification.program import Program, RequestSpec
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
    compared = ties = 0
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(one.answers, other.answers, strict=True):
            spec = one.program.requests[a.request]
            difference = _difference(a, b)
            compared += len(a.tokens) if difference is None else difference
            if difference is None:
                continue
            at = min(len(a.tokens), len(b.tokens))
            where: dict[str, Any] = {"program": number, "request": a.request, "index": difference}
            if difference == at:
                message = f"request {a.request} of program {number}: {_told(a)} on {names[0]}, {_told(b)} on {names[1]}"
                return CheckResult(Verdict.INVALID, property_name, "outcome", message, where)
            tied = oracles is not None and limits is not None and _tie(spec, a, b, difference, oracles, limits)
            if not tied:
                message = (
                    f"request {a.request} of program {number}: token {difference} is {a.tokens[difference]} on "
                    f"{names[0]} and {b.tokens[difference]} on {names[1]}, and that is no tie"
                )
                return CheckResult(Verdict.INVALID, property_name, "tokens", message, where)
            ties += 1
    allowed = 0 if limits is None else limits.tokens.ties.allowed(compared)
    measured = {
        "tokens_compared": Measurement(compared, "tokens"),
        "ties_between": Measurement(ties, "tokens", allowed, compared),
    }
    if compared == 0:
        return CheckResult(Verdict.UNKNOWN, property_name, "tokens", "no token was compared", {}, measured)
    message = f"{len(ours)} programs: {compared} tokens agree between {names[0]} and {names[1]}, {ties} ties"
    if ties > allowed:
        return CheckResult(
            Verdict.INVALID, property_name, "ties", f"{message}, at most {allowed} registered", {}, measured
        )
    return CheckResult(Verdict.VALID, property_name, "tokens", message, {}, measured)


def _told(answer: Answer) -> str:
    return f"{answer.outcome} after {len(answer.tokens)} tokens"


def _difference(a: Answer, b: Answer) -> int | None:
    """Index of the first token that differs; the shorter one's length where only the end does; None for equal
    answers."""
    for index, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if x != y:
            return index
    if len(a.tokens) != len(b.tokens) or a.outcome != b.outcome or a.alternatives != b.alternatives:
        return min(len(a.tokens), len(b.tokens))
    return None


def _tie(spec: RequestSpec, a: Answer, b: Answer, index: int, oracles: Oracles, limits: Thresholds) -> bool:
    ids = [*spec.prompt, *a.tokens[:index]]
    reference, ordinary = (oracle.teacher_force(ids, start=len(ids) - 1)[0] for oracle in oracles)
    pair = (a.tokens[index], b.tokens[index])
    if not all(0 <= token < len(ordinary) for token in pair):
        return False
    bound = limits.tokens.regret_factor * float(np.abs(ordinary.astype(np.float64) - reference).max())
    row = sampled_row(spec, a.tokens[:index], ordinary, oracles[1].eos_token_ids)
    if row is None:
        best = float(ordinary.max())
        return all(best - float(ordinary[token]) <= bound for token in pair)
    if spec.params.temperature == 0:
        values = adjusted(row)
        scale = max(1.0, spec.params.repetition_penalty, 1 / spec.params.repetition_penalty)  # of an error in a logit
        return all(float(values.max() - values[token]) <= bound * scale for token in pair)
    # An error of `bound` in a logit moves a candidate's place in the race by this much, in relation.
    near = min(0.5, max(limits.sampling.near, float(np.expm1(bound / spec.params.temperature))))
    loose = limits.sampling.model_copy(update={"near": near})
    return all(compare(replace(row, token=token), loose)[1] is not Agreement.WRONG for token in pair)


def sampled_row(spec: RequestSpec, before: Iterable[int], logits: Any, eos: Iterable[int]) -> SampledRow | None:
    """The row for the sampling rule, None where the token is the argmax of the raw logits."""
    p, output = spec.params, tuple(before)
    plain = p.temperature == 0 and p.repetition_penalty == 1 and p.presence_penalty == p.frequency_penalty == 0
    if plain and not p.logit_bias and len(output) >= p.min_tokens and spec.mask_seed is None:
        return None
    return SampledRow.of(p, logits, 0, prompt=spec.prompt, output=output, eos=tuple(eos))
