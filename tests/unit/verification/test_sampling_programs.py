"""Drawn sampling parameters, and the clauses about them on hand-made histories."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest

from blink_core.abi.capture import record_dtype
from blink_core.abi.enums import EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from verification.history import History, Submitted
from verification.masks import allowed_ids, mask_words
from verification.oracles.sampler import Agreement, alternatives, compare, log_probabilities, raw_greedy
from verification.program import FAR_DEADLINE_US, Program, RequestSpec, Shape, draw_program
from verification.properties import token_equivalence as te
from verification.properties.log_probabilities import check_log_probabilities
from verification.result import Verdict
from verification.thresholds import default_thresholds

LIMITS = default_thresholds().sampling


def greedy(spec: RequestSpec, index: int) -> bool:
    """Whether the raw logits decide the token at output position `index`."""
    return raw_greedy(te.row_of(spec, (0,) * index, np.zeros(VOCAB, np.float32), 0))


VOCAB = 30
EOS = (4, 9)


def drawn(count: int) -> list[Program]:
    shape = Shape(vocab=VOCAB, page_size=4, longest=64, sampled=0.5, masks=2)
    return [draw_program(random.Random(seed), shape) for seed in range(count)]


def test_every_parameter_is_drawn_greedy_and_not() -> None:
    """Catches: a parameter that no program of the suite ever uses, or plain greedy requests drawn too rarely."""
    params = [r.params for program in drawn(150) for r in program.requests]
    plain = SamplingParams(1)
    lengths = {"max_tokens", "seed", "ignore_eos", "priority", "deadline_us", "prefix_cache", "mask_box"}
    only_hot = {"temperature", "top_p", "top_k", "min_p", "choice"}
    for name in {field.name for field in fields(SamplingParams)} - lengths:
        for hot in (True, False) if name not in only_hot else (True,):
            used = [p for p in params if (p.temperature > 0) == hot and getattr(p, name) != getattr(plain, name)]
            assert len(used) >= 10, (name, hot)
    assert sum(greedy(RequestSpec((1,), p), 0) for p in params) >= len(params) / 3
    assert all(p.min_tokens <= p.max_tokens and len(dict(p.logit_bias)) == len(p.logit_bias) for p in params)


def test_classes_deadlines_masks_and_shared_beginnings_are_drawn() -> None:
    """Catches: a scheduler feature that no drawn program uses, one that all use, or a deadline that a run may miss."""
    programs = drawn(150)
    specs = [r for program in programs for r in program.requests]
    for used in (
        [r for r in specs if r.params.priority > 0],
        [r for r in specs if not r.params.prefix_cache],
        [r for r in specs if r.params.deadline_us],
        [r for r in specs if r.mask_seed is not None],
    ):
        assert len(specs) / 20 <= len(used) <= len(specs) / 3
    assert all(r.params.deadline_us in (0, FAR_DEADLINE_US) for r in specs)
    assert {r.params.priority for r in specs} == {0, 1, 2, 3}
    ends = set()
    for program in programs:
        for index, spec in enumerate(program.requests):
            before = sum(r.params.max_tokens + 1 for r in program.requests[:index])
            for other in program.requests[:index]:
                shared = next(
                    (i for i, (a, b) in enumerate(zip(spec.prompt, other.prompt, strict=False)) if a != b), 99
                )
                if spec.after == before and 3 <= shared < 99:
                    ends.add(shared % 4)
    assert ends == {0, 1, 2, 3}  # at page boundaries, and off by one on both sides
    assert all(r.mask_seed is None for p in [draw_program(random.Random(3), Shape(VOCAB, 4, 64))] for r in p.requests)


def test_masks_are_functions_of_seed_and_place() -> None:
    """Catches: a mask that differs between two uses or allows nothing, or whose bits lie elsewhere than in the ABI."""
    for vocab in (1, 31, 32, 33, 100):
        allowed = allowed_ids(9, 4, vocab)
        assert allowed.any()
        assert (allowed == allowed_ids(9, 4, vocab)).all()
        words = mask_words(allowed)
        assert words.dtype == np.uint32
        assert len(words) == -(-vocab // 32)
        assert [bool(int(words[i // 32]) >> i % 32 & 1) for i in range(vocab)] == allowed.tolist()
    assert len({allowed_ids(seed, index, 64).tobytes() for seed in range(4) for index in range(4)}) == 16


def test_masked_rows_are_held_to_their_masks() -> None:
    """Catches: a masked token judged as if every id were allowed, or a masked greedy row judged by its raw logits."""
    history, rows = play(SamplingParams(20, seed=5))
    spec = replace(history.program.requests[0], mask_seed=8)
    history.program = Program((spec,))
    found = te.sampled_rows(history, rows)
    assert len(found) == 20
    assert [row.mask for row in found] == [
        frozenset(np.flatnonzero(allowed_ids(8, i, VOCAB)).tolist()) for i in range(20)
    ]
    assert te.check_sampler(found, LIMITS).verdict is Verdict.INVALID
    assert not greedy(spec, 0)


def test_programs_survive_json() -> None:
    """Catches: a replayed program whose bias or stop ids are lists, which equal nothing, or are lost."""
    for program in drawn(60):
        assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program
    old = asdict(SamplingParams(3))
    del old["logit_bias"]  # written before there was one
    stored = {"requests": [{"prompt": [1], "params": old, "after": 0, "cancel_after": None}]}
    assert Program.from_json(stored).requests[0] == RequestSpec((1,), SamplingParams(3))


def play(params: SamplingParams, **engine: Any) -> tuple[History, dict[te.Key, Any]]:
    """A run of one request on an engine that obeys, but for the parameters in `engine`; the logits it captured."""
    rng = np.random.default_rng(params.seed)
    prompt, used = (1, 2, 3), replace(params, **engine)
    records = np.zeros(params.max_tokens, record_dtype(VOCAB))
    records["ring"], records["slot"], records["generation"], records["vocab"] = 1, 3, 2, VOCAB
    records["logits"] = rng.normal(0.5, 2, records["logits"].shape)
    records["position"] = 3 + np.arange(params.max_tokens)
    events: list[dict[str, Any]] = []
    where = {"slot": 3, "generation": 2}
    rows = {(1, 3, 2, 3 + i): records[i] for i in range(params.max_tokens)}
    for i in range(params.max_tokens):
        made = History(Program((RequestSpec(prompt, used),)), 1, [Submitted(0, 3, 2, 0)], events=list(events))
        made.events.append({**where, "kind": EventKind.TOKEN, "index": i, "token": -1})
        row = te.sampled_rows(made, rows, EOS)
        logits = records[i]["logits"]
        token = compare(row[-1])[0] if row and row[-1].position == 3 + i else int(logits.argmax())
        top = alternatives(logits, params.logprobs)
        for at in range(0, len(top), 2):
            ids, values = zip(*top[at : at + 2], strict=True)
            event = {**where, "kind": EventKind.LOGPROBS, "count": len(ids)}
            events.append({**event, "tokens": list(ids), "logprobs": list(values)})
        logprob = float(log_probabilities(logits)[token])
        events.append({**where, "kind": EventKind.TOKEN, "index": i, "token": token, "logprob": logprob})
        records[i]["token"] = token
    events.append({**where, "kind": EventKind.FINISH, "reason": FinishReason.LENGTH})
    return History(
        Program((RequestSpec(prompt, params),)), 1, [Submitted(0, 3, 2, 0)], events=events, complete=True
    ), rows


GREEDY = SamplingParams(
    25,
    logit_bias=((7, 3.0), (8, -5.0)),
    repetition_penalty=1.5,
    presence_penalty=1.0,
    frequency_penalty=0.7,
    min_tokens=20,
    stop_token_ids=(11,),
    logprobs=5,
)
HOT = replace(GREEDY, temperature=1.2, top_k=12, top_p=0.9, min_p=0.05, choice=4)


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_obedient_engine_passes(params: SamplingParams) -> None:
    """Catches: a clause that disagrees with the oracle, or greedy rows with changed logits left out of it."""
    history, rows = play(params)
    found = te.sampled_rows(history, rows, EOS)
    assert len(found) == 25
    assert {compare(row)[1] for row in found} == {Agreement.SAME}
    assert check_log_probabilities(history, rows, LIMITS.logprob_tolerance).ok()


@pytest.mark.parametrize(
    "fault",
    [
        {"logit_bias": ()},
        {"repetition_penalty": 1.0},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0.0},
        {"min_tokens": 0},
        {"stop_token_ids": ()},
        {"top_k": 0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"choice": 0},
    ],
)
def test_disobedient_engine_is_seen(fault: dict[str, Any]) -> None:
    """Catches: a parameter that the certificate does not look at."""
    seen = 0
    for seed in range(12):
        base = replace(HOT, seed=seed, temperature=2.0, min_p=0.2 if "min_p" in fault else 0.0)
        base = replace(base, top_k=4 if "top_k" in fault else 0, top_p=0.6 if "top_p" in fault else 1.0)
        if not {"min_p", "top_p", "top_k", "choice"} & set(fault):
            base = replace(base, temperature=0.7)
        history, rows = play(base, **fault)
        seen += te.check_sampler(te.sampled_rows(history, rows, EOS), LIMITS).verdict is Verdict.INVALID
    assert seen >= 3


def test_raw_greedy_ends_where_min_tokens_does() -> None:
    """Catches: greedy rows judged as raw argmaxima although an id was barred, or spared when none is any more."""
    params = SamplingParams(9, min_tokens=4)
    assert [greedy(RequestSpec((1,), params), index) for index in range(6)] == [False] * 4 + [True] * 2
    history, rows = play(params)
    assert len(te.sampled_rows(history, rows, EOS)) == 4


@pytest.mark.parametrize("what", ["value", "nan", "id", "order", "alternative", "missing token"])
def test_wrong_log_probabilities_are_seen(what: str) -> None:
    """Catches: log probabilities after temperature or penalties, of another row, or NaN; alternatives out of order."""
    history, rows = play(HOT)
    token = next(e for e in history.events if e["kind"] == EventKind.TOKEN)
    first = next(e for e in history.events if e["kind"] == EventKind.LOGPROBS)
    if what == "value":
        token["logprob"] += 1e-3
    elif what == "nan":
        token["logprob"] = float("nan")
    elif what == "id":
        first["tokens"][0] = (first["tokens"][0] + 1) % VOCAB
    elif what == "order":
        first["tokens"].reverse()
    elif what == "alternative":
        first["logprobs"][1] -= 1e-3
    else:
        history.events = [e for e in history.events if e["kind"] not in (EventKind.TOKEN, EventKind.LOGPROBS)]
    result = check_log_probabilities(history, rows, LIMITS.logprob_tolerance)
    expected = Verdict.UNKNOWN if what == "missing token" else Verdict.INVALID
    assert (result.clause, result.verdict) == ("logprob", expected)
