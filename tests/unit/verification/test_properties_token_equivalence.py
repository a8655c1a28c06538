"""Capture, sampler and pooling of token equivalence on hand-made rows; the sampler's oracle on known answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blink_core.abi.capture import record_dtype
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from verification.criterion import score_tokens
from verification.history import History, Submitted
from verification.oracles import sampler
from verification.oracles.sampler import Agreement, SampledRow
from verification.program import Program, RequestSpec
from verification.properties import token_equivalence as te
from verification.result import Verdict
from verification.thresholds import Thresholds, default_thresholds

LIMITS = default_thresholds().sampling

VOCAB, ROWS = 300, 120


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """Catches: any error in the generator. The answers are those that its authors publish (Random123)."""
    assert sampler.philox4x32_10([counter], key).tolist() == [list(words)]


def test_uniforms_use_counter_and_lane() -> None:
    """Catches: position, choice or id in the wrong word; a lane mix-up; a number outside (0, 1)."""
    u = sampler.uniforms(10, seed=7 + (3 << 32), choice=5, position=11)
    words = sampler.philox4x32_10([[6 >> 2, 11, 5, 0]], (7, 3))[0]
    assert u[6] == (int(words[6 & 3]) + 0.5) * 2.0**-32
    assert len(u) == 10
    assert ((u > 0) & (u < 1)).all()


def test_nucleus_is_the_smallest_set() -> None:
    """Catches: one id too many or too few, ties that go to the higher id."""
    p = np.array([0.1, 0.25, 0.25, 0.4])
    assert sampler.nucleus(p, 0.4).tolist() == [False, False, False, True]
    assert sampler.nucleus(p, 0.5).tolist() == [False, True, False, True]
    assert sampler.nucleus(p, 0.66).tolist() == [False, True, True, True]
    assert sampler.nucleus(p, 1.0).all()


def _rows(**engine: float) -> list[SampledRow]:
    """Rows of a sampler that obeys, except that it uses the parameters given in `engine` instead of those asked for."""
    draw, rows = np.random.default_rng(3), []
    for i in range(ROWS):
        asked = SampledRow(
            draw.normal(0, 2, VOCAB).astype(np.float32), -1, float(draw.choice((0.5, 1.5))), 0.7, 1000 + i, 0, 40 + i
        )
        used = replace(asked, **engine)  # type: ignore[arg-type]
        rows.append(replace(asked, token=sampler.compare(used)[0]))
    return rows


def test_obedient_sampler_passes() -> None:
    """Catches: an oracle that disagrees with itself."""
    result = te.check_sampler(_rows(), LIMITS)
    assert result.ok(), result
    assert result.measurements["sampled_excused"].value == 0


@pytest.mark.parametrize(
    "fault", [{"seed": 0}, {"temperature": 1.0}, {"top_p": 1.0}, {"position": 0}, {"choice": 1}, {"top_p": 0.69}]
)
def test_planted_sampler_faults_are_killed(fault: dict[str, float]) -> None:
    """Catches: a checker blind to an ignored seed, temperature, top_p, position or choice, or to another nucleus."""
    result = te.check_sampler(_rows(**fault), LIMITS)
    assert (result.clause, result.verdict) == ("sampler", Verdict.INVALID)
    assert "expected" in str(result.witness)


def test_greedy_instead_of_sampling_is_killed() -> None:
    """Catches: temperature treated as zero."""
    rows = [replace(row, token=int(row.logits.argmax())) for row in _rows()]
    assert te.check_sampler(rows, LIMITS).verdict is Verdict.INVALID


def test_foreign_ids_and_bad_logits_are_wrong() -> None:
    """Catches: an exception, or a pass, on an id outside the vocabulary or on NaN."""
    row = _rows()[0]
    for token in (-1, VOCAB, 2**31 - 1):
        assert sampler.compare(replace(row, token=token))[1] is Agreement.WRONG
    assert sampler.compare(replace(row, logits=np.full(VOCAB, np.nan, np.float32)))[1] is Agreement.WRONG


def _photo_finish(gap: float) -> SampledRow:
    """The winner's probability is lowered until it beats the runner-up by a relative `gap` only, which is emitted."""
    row = replace(_rows()[0], top_p=1.0, temperature=1.0)
    first, second = np.argsort(-sampler.race(row)[1])[:2]
    logits = row.logits.astype(np.float64)
    scores = sampler.race(replace(row, logits=logits))[1]  # type: ignore[arg-type]
    logits[first] += np.log(scores[second] * (1 + gap) / scores[first])
    return replace(row, logits=logits, token=int(second))  # type: ignore[arg-type]


def test_only_rounding_excuses() -> None:
    """Catches: a near miss that is rejected, a plain miss that is excused, excuses without a limit."""
    assert sampler.compare(_photo_finish(2e-5))[1] is Agreement.NEAR
    assert sampler.compare(_photo_finish(2e-3))[1] is Agreement.WRONG
    assert te.check_sampler([*_rows()[:50], _photo_finish(2e-5)], LIMITS).ok()
    assert te.check_sampler([_photo_finish(2e-5)] * 2, LIMITS).verdict is Verdict.INVALID


def test_nucleus_edge_excuses() -> None:
    """Catches: a token rejected because a sum in another order puts it just inside or outside the nucleus."""
    # A row and a size of the nucleus with which the id let in last wins.
    for row in (replace(r, temperature=1.0) for r in _rows()):
        p, scores = sampler.race(row)
        order = np.argsort(-p)
        size = next((n for n in range(4, 40) if scores[order[:n]].argmax() == n - 1), 0)
        if size:
            break
    below = float(p[order[: size - 1]].sum())
    assert sampler.compare(replace(row, top_p=below * (1 - 3e-5), token=int(order[size - 1])))[1] is Agreement.EDGE
    assert sampler.compare(replace(row, top_p=below * (1 - 3e-3), token=int(order[size - 1])))[1] is Agreement.WRONG


# ---- capture


def _history(tokens: list[int], temperature: float = 0.0) -> History:
    program = Program((RequestSpec((4, 5), SamplingParams(8, temperature=temperature, seed=6)),))
    events = [
        {"slot": 3, "generation": 2, "kind": EventKind.TOKEN, "index": i, "token": t} for i, t in enumerate(tokens)
    ]
    events.append({"slot": 3, "generation": 2, "kind": EventKind.FINISH, "reason": FinishReason.LENGTH})
    return History(program, 1, [Submitted(0, 3, 2, 0)], events=events, complete=True)


def _records(tokens: list[int]) -> Array:
    records = np.zeros(len(tokens), record_dtype(8))
    records["ring"], records["slot"], records["generation"], records["vocab"] = 1, 3, 2, 8
    records["position"], records["token"] = 2 + np.arange(len(tokens)), tokens
    return records


def test_capture_clause() -> None:
    """Catches: a delivered token without logits or with another's; two samples of one place; nothing at all."""
    rows, result = te.index_capture(_records([6, 7]), 8)
    assert result.ok()
    assert te.check_capture(_history([6, 7]), rows).ok()
    for tokens in ([6, 5], [6, 7, 1]):
        found = te.check_capture(_history(tokens), rows)
        assert (found.clause, found.verdict) == ("capture", Verdict.INVALID)
    assert te.check_capture(_history([]), rows).verdict is Verdict.UNKNOWN
    twice = np.concatenate([_records([6, 7]), _records([6])])
    assert te.index_capture(twice, 8)[1].verdict is Verdict.INVALID
    assert te.index_capture(_records([6]), 9)[1].verdict is Verdict.INVALID


def test_window_holds_one_run_only(tmp_path: Path) -> None:
    """Catches: rows of an earlier epoch with the same slot, generation and position taken for this run's."""
    path, size = tmp_path / "capture.bin", record_dtype(8).itemsize
    path.write_bytes(_records([1, 2]).tobytes() + _records([6, 7]).tobytes() + b"torn")
    assert te.read_window(path, 8, (2 * size, 4 * size + 4))["token"].tolist() == [6, 7]
    assert te.read_window(path, 8, (4 * size, 4 * size + 4)).size == 0
    assert te.read_window(tmp_path / "absent", 8, (0, 0)).size == 0


def test_sampled_rows_are_those_with_a_temperature() -> None:
    """Catches: a position off by one, greedy rows given to the sampler's rule, a pass without any row."""
    rows, _ = te.index_capture(_records([6, 7]), 8)
    found = te.sampled_rows(_history([6, 7], temperature=0.5), rows)
    assert [(r.token, r.position, r.temperature, r.seed) for r in found] == [(6, 2, 0.5, 6), (7, 3, 0.5, 6)]
    assert te.sampled_rows(_history([6, 7]), rows) == []
    assert te.check_sampler([], LIMITS).verdict is Verdict.UNKNOWN


def test_judge_needs_greedy_rows(limits: Thresholds) -> None:
    """Catches: a pass over no rows, or over sampled rows alone, whose choice the criterion does not judge."""
    logits = np.random.default_rng(1).normal(0, 3, (200, 40))
    other = logits + 1e-6 * np.random.default_rng(2).normal(0, 1, logits.shape)
    parts = {
        greedy: score_tokens(
            logits=other, hf64=logits, hf32=other[::-1][::-1], emitted=logits.argmax(axis=1), greedy=greedy
        )
        for greedy in (True, False)
    }
    assert te.judge([parts[True]], limits.tokens).ok()
    assert te.judge([parts[False]], limits.tokens).verdict is Verdict.UNKNOWN
    assert te.judge([], limits.tokens).verdict is Verdict.UNKNOWN
