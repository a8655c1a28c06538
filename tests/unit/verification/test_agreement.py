"""Canonical histories, and the comparison of two rigs' answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blink_core.abi.enums import EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from tests.unit.verification.conftest import Rig
from verification.agreement_record import FILE, AgreementError, find, read, write
from verification.canonical import CANCELLED, Answer, answers, history_digest, program_digest
from verification.history import History, Submitted
from verification.masks import allowed_ids
from verification.oracles.hf import OracleError
from verification.oracles.hf_paged import PagedOracle, PagedSizes
from verification.oracles.sampler import raw_greedy
from verification.program import Program, RequestSpec
from verification.properties.agreement import Ran, check
from verification.properties.token_equivalence import row_of
from verification.result import Verdict
from verification.run_context import RunContext
from verification.suite import test_agreement as suite
from verification.thresholds import Thresholds

NEW = 12


def history(tokens: list[int], *, slot: int = 3, cancel: int | None = None, cancelled: bool = False) -> History:
    """One request's history."""
    spec = RequestSpec((1, 2, 3), SamplingParams(8), cancel_after=cancel)
    name = {"slot": slot, "generation": 1}
    events: list[dict[str, Any]] = [
        name | {"kind": EventKind.TOKEN, "index": i, "token": t, "reason": 0} for i, t in enumerate(tokens)
    ]
    reason = FinishReason.CANCELLED if cancelled else FinishReason.LENGTH
    events.append(name | {"kind": EventKind.FINISH, "index": len(tokens), "token": 0, "reason": reason})
    cancels = {0} if cancel is not None else set()
    return History(Program((spec,)), 1, [Submitted(0, slot, 1, 0)], cancels, events, complete=True)


def test_canonical_history_forgets_what_timing_decides() -> None:
    """Catches: a digest that hangs on slots or on when a cancel arrived; one that does not see a changed token."""
    assert history_digest(history([4, 5, 6])) == history_digest(history([4, 5, 6], slot=0))
    assert history_digest(history([4, 5, 6])) != history_digest(history([4, 5, 7]))
    early = history([4, 5], cancel=2, cancelled=True)
    late = history([4, 5, 6, 7], cancel=2, cancelled=True)
    missed = history([4, 5, 6, 7, 8, 9, 1, 2], cancel=2)
    unsent = replace(missed, cancels=set())  # one poll showed the second token and the end
    assert history_digest(early) == history_digest(late) == history_digest(missed) == history_digest(unsent)
    assert answers(late) == [Answer(0, CANCELLED, (4, 5))]
    assert history_digest(history([4, 9], cancel=2, cancelled=True)) != history_digest(early)


@pytest.fixture(scope="module")
def ran(tiny3: Rig) -> list[Ran]:
    """Greedy answers of HuggingFace to two prompts."""
    prompts = [tuple(sequence[: tiny3.prompt]) for sequence in tiny3.sequences[:2]]
    program = Program(tuple(RequestSpec(prompt, SamplingParams(NEW, ignore_eos=True)) for prompt in prompts))
    own = [tuple(sequence[tiny3.prompt : tiny3.prompt + NEW]) for sequence in tiny3.sequences[:2]]
    return [Ran(program, tuple(Answer(i, "FINISH LENGTH", tokens) for i, tokens in enumerate(own)))]


def changed(ran: list[Ran], **values: Any) -> list[Ran]:
    first, *rest = ran[0].answers
    return [Ran(ran[0].program, (replace(first, **values), *rest))]


def test_disagreements_are_found_and_ties_are_not(tiny3: Rig, ran: list[Ran], limits: Thresholds) -> None:
    """Catches: a comparison that lets a wrong token, a lost one or another end pass, or that calls a tie a fault."""
    pair = (tiny3.hf64, tiny3.hf32)
    assert check(ran, ran, oracles=pair, limits=limits).ok()
    tokens = ran[0].answers[0].tokens
    for values, clause in (
        ({"tokens": (*tokens[:5], (tokens[5] + 1) % 512, *tokens[6:])}, "tokens"),
        ({"tokens": tokens[:5]}, "outcome"),
        ({"outcome": "FINISH EOS"}, "outcome"),
        ({"tokens": (*tokens[:5], 5000, *tokens[6:])}, "tokens"),
    ):
        result = check(ran, changed(ran, **values), oracles=pair, limits=limits)
        assert (result.verdict, result.clause) == (Verdict.INVALID, clause), values
    # With so wide a bound any token is a tie; what follows it is not compared, and the ties are counted.
    wide = limits.model_copy(update={"tokens": limits.tokens.model_copy(update={"regret_factor": 1e9})})
    other = changed(ran, tokens=(*tokens[:5], (tokens[5] + 1) % 512, *[0] * 6))
    assert check(ran, other, oracles=pair, limits=wide).ok()
    both = [
        Ran(ran[0].program, tuple(replace(a, tokens=((a.tokens[0] + 1) % 512, *a.tokens[1:])) for a in ran[0].answers))
    ]
    assert check(ran, both, oracles=pair, limits=wide).clause in ("ties", "tokens")
    assert check(ran, both, oracles=pair, limits=wide).verdict is not Verdict.VALID


LISTED = 3


@pytest.fixture(scope="module")
def listing(tiny3: Rig) -> list[Ran]:
    """One greedy answer of HuggingFace with the ids of its best logits beside each token, two an event."""
    prompt, own = (
        tuple(tiny3.sequences[0][: tiny3.prompt]),
        tuple(tiny3.sequences[0][tiny3.prompt : tiny3.prompt + NEW]),
    )
    rows = tiny3.hf32.teacher_force([*prompt, *own[:-1]], start=len(prompt) - 1)
    ids = [tuple(row.argsort()[::-1][:LISTED].tolist()) for row in rows]
    events = tuple(part for one in ids for part in (one[:2], one[2:]))
    program = Program((RequestSpec(prompt, SamplingParams(NEW, ignore_eos=True, logprobs=LISTED)),))
    return [Ran(program, (Answer(0, "FINISH LENGTH", own, events),))]


def other_list(listing: list[Ran], at: int, *ids: int) -> list[Ran]:
    """The same with other alternatives of token `at`."""
    events = listing[0].answers[0].alternatives
    return changed(listing, alternatives=(*events[: 2 * at], ids[:2], ids[2:], *events[2 * at + 2 :]))


def test_alternatives_tie_within_the_measured_error_only(tiny3: Rig, listing: list[Ran], limits: Thresholds) -> None:
    """Catches: another order of two equal alternatives called a fault; a wrong, a missing or a repeated alternative
    called a tie; ties that nobody counts, or as many as there are; tokens behind a tie that are not compared."""
    pair = (tiny3.hf64, tiny3.hf32)
    ids = [token for event in listing[0].answers[0].alternatives for token in event]
    first, second, third = ids[3 * 4 : 3 * 5]
    swapped = other_list(listing, 4, first, third, second)
    agreed = check(listing, listing, oracles=pair, limits=limits)
    assert agreed.ok()
    assert agreed.measurements["alternatives_compared"].value == LISTED * NEW

    found = check(listing, swapped, oracles=pair, limits=limits)  # far apart for this model
    assert (found.verdict, found.clause) == (Verdict.INVALID, "alternatives")
    assert "alternatives of token 4" in found.message
    assert check(listing, swapped).clause == "alternatives"  # without oracles nothing is a tie

    # A factor by which exactly the gap of these two is within the bound.
    context = [*listing[0].program.requests[0].prompt, *listing[0].answers[0].tokens[:4]]
    exact, row = (oracle.teacher_force(context, start=len(context) - 1)[0] for oracle in pair)
    gap = float(row[second] - row[third]) / float(abs(row - exact).max())
    wide = limits.model_copy(update={"tokens": limits.tokens.model_copy(update={"regret_factor": gap * 1.01})})
    tight = limits.model_copy(update={"tokens": limits.tokens.model_copy(update={"regret_factor": gap * 0.99})})
    tied = check(listing, swapped, oracles=pair, limits=wide)
    assert tied.ok(), tied
    assert (tied.measurements["ties_of_alternatives"].value, tied.measurements["ties_between"].value) == (1, 0)
    assert tied.measurements["tokens_compared"].value == NEW
    assert check(listing, swapped, oracles=pair, limits=tight).clause == "alternatives"

    behind = changed(swapped, tokens=(*swapped[0].answers[0].tokens[:-1], int(row.argmin())))
    assert check(listing, behind, oracles=pair, limits=wide).clause == "tokens"
    for ids_there in ((first, second, second), (first, second, int(row.argmin())), (first, second, 5000)):
        wrong = check(listing, other_list(listing, 4, *ids_there), oracles=pair, limits=wide)
        assert (wrong.verdict, wrong.clause) == (Verdict.INVALID, "alternatives"), ids_there
    fewer = changed(listing, alternatives=listing[0].answers[0].alternatives[:-1])
    assert check(listing, fewer, oracles=pair, limits=wide).clause == "alternatives"

    both = wide.model_copy(update={"tokens": wide.tokens.model_copy(update={"regret_factor": 1e9})})
    twice = changed(swapped, alternatives=(*swapped[0].answers[0].alternatives[:-2], (7, 8), (9,)))
    over = check(listing, twice, oracles=pair, limits=both)
    assert (over.verdict, over.clause) == (Verdict.INVALID, "ties")


def test_ties_know_the_mask(tiny3: Rig, ran: list[Ran], limits: Thresholds) -> None:
    """Catches: a token that its grammar mask forbids called as good as the one that was chosen."""
    prompt = ran[0].program.requests[0].prompt
    (row,) = tiny3.hf32.teacher_force(list(prompt), start=len(prompt) - 1)
    order, vocab = row.argsort()[::-1].tolist(), len(row)
    best = order[0]
    mask_seed = next(seed for seed in range(100) if not allowed_ids(seed, 0, vocab)[best])
    chosen, second = [token for token in order if allowed_ids(mask_seed, 0, vocab)[token]][:2]
    spec = RequestSpec(prompt, SamplingParams(2, ignore_eos=True), mask_seed=mask_seed)
    wide = limits.model_copy(update={"tokens": limits.tokens.model_copy(update={"regret_factor": 1e9})})

    def answered(token: int) -> list[Ran]:
        return [Ran(Program((spec,)), (Answer(0, "FINISH LENGTH", (1, 1)), Answer(0, "FINISH LENGTH", (token, 1))))]

    one, pair = answered(chosen), (tiny3.hf64, tiny3.hf32)
    assert check(one, answered(second), oracles=pair, limits=wide).ok()
    assert check(one, answered(best), oracles=pair, limits=wide).clause == "tokens"


def test_disagreements_are_planted_in_a_request_that_any_seed_has() -> None:
    """Catches: a planted disagreement that with some seeds is none: in a drawn token of which another is as good, in a
    request that has no tokens, or ends by chance as the planted end says."""
    for seed in range(300):
        drawn = suite.draw(seed, 1, 512)[0]
        program, victim = suite.with_witness(drawn, seed, 512)
        spec = program.requests[victim]
        assert program.requests[:victim] == tuple(replace(r, cancel_after=None) for r in drawn.requests)
        assert (spec.cancel_after, spec.mask_seed, spec.params.stop_token_ids) == (None, None, ())
        assert (spec.params.ignore_eos, spec.params.max_tokens, spec.params.deadline_us) == (True, suite.NEW, 0)
        assert len(spec.prompt) + suite.NEW <= suite.LONGEST
        row = np.zeros(512, np.float32)
        assert all(raw_greedy(row_of(spec, (0,) * index, row, 0)) for index in range(suite.NEW))


def test_other_programs_are_no_agreement(ran: list[Ran]) -> None:
    """Catches: two runs of different programs, or none at all, that agree."""
    other = [Ran(Program(ran[0].program.requests[:1]), ran[0].answers[:1])]
    assert check(ran, other).verdict is Verdict.UNKNOWN
    assert check([], []).verdict is Verdict.UNKNOWN


def test_records_are_read_back_and_damage_is_named(tmp_path: Path, ran: list[Ran]) -> None:
    """Catches: a record that is compared although it was changed, or is of something else."""
    run = RunContext("r1", "local", "smoke", None, 7, "given", None)
    path = tmp_path / "evidence" / FILE
    path.parent.mkdir()
    write(path, run, 9, "tiny", ran)
    replayed = tmp_path / "corpus" / "0123" / "evidence" / FILE  # of an earlier failure
    replayed.parent.mkdir(parents=True)
    write(replayed, run, 8, "tiny", ran[:0])
    found = read(tmp_path)
    assert (found.rig, found.root_seed, found.seed, found.subject) == ("local", 7, 9, "tiny")
    assert list(found.ran) == ran
    values = json.loads(path.read_text(encoding="utf-8"))
    values["programs"][0]["program"]["requests"][0]["prompt"][0] += 1
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(AgreementError, match="damaged"):
        read(tmp_path)
    with pytest.raises(AgreementError, match="holds 0 files"):
        find(tmp_path / "nothing")
    assert program_digest(ran[0].program) == program_digest(Program.from_json(ran[0].program.to_json()))


def test_paged_oracle_gives_what_generate_gives(tiny3: Rig, ran: list[Ran]) -> None:
    """HuggingFace's continuous batching on this machine: chunked prompts, blocks that must be waited for.

    Catches: a transformers release whose continuous batching no longer runs on the CPU, or gives other tokens.
    """
    paged = PagedOracle.load(tiny3.model.path)
    prompts = [spec.prompt for spec in ran[0].program.requests]
    tokens = paged.generate(prompts, [NEW, NEW - 2], sizes=PagedSizes(blocks=6, batch_tokens=24, batch_requests=2))
    first, second = (answer.tokens for answer in ran[0].answers)
    assert tokens == [list(first), list(second[: NEW - 2])]
    with pytest.raises(OracleError, match="does not fit 3 blocks"):
        paged.generate(prompts, [NEW, NEW], sizes=PagedSizes(blocks=3))
    with pytest.raises(OracleError, match="2 prompts with 1 limits"):
        paged.generate(prompts, [NEW])
