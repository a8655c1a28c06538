"""The token criterion: kills planted faults, accepts other correct float32 runs, tells ties from everything else."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from verification.criterion import TokenScores, check_tokens, judge_tokens, score_tokens
from verification.criterion.yardstick import clopper_pearson, measure_yardstick
from verification.models import sensitivity
from verification.oracles.hf import HFOracle
from verification.result import CheckResult, Measurement, Verdict
from verification.thresholds import Thresholds

pytestmark = pytest.mark.usefixtures("well_formed")
Array = NDArray[Any]
Rig = Any  # conftest.Rig; conftest modules cannot be imported


def _rows(oracle: HFOracle, rig: Rig) -> Array:
    """Logits of the rows that emit the rig's continuations, [sequences * steps, vocab]."""
    return np.concatenate([oracle.forward(s[:-1], start=rig.prompt - 1).logits for s in rig.sequences])


def _judge(rig: Rig, logits: Array, limits: Thresholds, emitted: Array | None = None) -> CheckResult:
    tokens = np.concatenate([s[rig.prompt :] for s in rig.sequences]) if emitted is None else emitted
    hf64, hf32 = _rows(rig.hf64, rig), _rows(rig.hf32, rig)
    return check_tokens(logits=logits, hf64=hf64, hf32=hf32, emitted=tokens, thresholds=limits.tokens)


def _perturbed(rig: Rig, perturb: sensitivity.Perturb | None) -> Array:
    """Teacher forcing where the prompt's cache was perturbed before the last prompt token was run."""
    ids = torch.tensor(rig.sequences)
    cached, model = rig.prompt - 1, rig.hf32.model
    with torch.inference_mode():
        clean = DynamicCache(config=model.config)
        model(ids[:, :cached], cache=clean, use_cache=True)
        cache = DynamicCache(config=model.config)
        for layer, part in enumerate(clean.layers):
            cache.update(*(perturb(part.keys, part.values) if perturb else (part.keys, part.values)), layer)
        logits = model(ids[:, cached:-1], cache=cache, use_cache=True).logits
    return np.concatenate(list(logits.numpy()))


@pytest.fixture(params=["tiny3", "tiny7"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.getfixturevalue(request.param)


def test_accepts_huggingface_float32_itself(rig: Rig, limits: Thresholds) -> None:
    """Catches: a criterion that rejects its own yardstick."""
    result = _judge(rig, _rows(rig.hf32, rig), limits)
    assert result.ok(), result
    assert result.measurements["worst_rms_ratio"].value < 3


def test_accepts_other_correct_float32_runs(rig: Rig, limits: Thresholds) -> None:
    """Catches: false rejection of another attention kernel, another step shape or another order of summation."""
    sdpa = HFOracle.load(rig.model.path, dtype="float32", attention="sdpa", threads=1)
    reordered = HFOracle.load(rig.model.path, dtype="float32", threads=1)
    with torch.no_grad():
        for number, layer in enumerate(reordered.model.model.layers):
            mlp = layer.mlp
            order = torch.from_numpy(np.random.default_rng(number).permutation(mlp.up_proj.out_features))
            for projection in (mlp.gate_proj, mlp.up_proj):
                projection.weight.copy_(projection.weight[order])
            mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])
    others = {"sdpa": _rows(sdpa, rig), "reordered": _rows(reordered, rig)}
    yardstick = _rows(rig.hf32, rig)
    for name, logits in others.items():
        assert not np.array_equal(logits, yardstick), f"{name} is no other implementation"
    for name, logits in {**others, "from a cache": _perturbed(rig, None)}.items():
        result = _judge(rig, logits, limits)
        assert result.ok(), f"{name}: {result}"
        assert result.measurements["worst_rms_ratio"].value < limits.tokens.rms_factor / 2


@pytest.mark.parametrize("fault", ["foreign-page", "foreign-row", "wrong-position"])
def test_kills_cache_faults(rig: Rig, limits: Thresholds, fault: str) -> None:
    """Catches: a criterion blind to a page, a row, or a rotation that belongs elsewhere."""
    struck = torch.from_numpy(np.random.default_rng(3).integers(0, rig.prompt - 1, len(rig.sequences)))
    perturb = sensitivity.cache_faults(rig.hf32.model, struck)[fault]
    result = _judge(rig, _perturbed(rig, perturb), limits)
    assert result.verdict is Verdict.INVALID
    assert result.clause == "logits"
    assert float(result.measurements["worst_rms_ratio"].value) > 100 * limits.tokens.rms_factor
    witness: Any = result.witness["rows"]
    assert witness[0]["rms_ratio"] >= witness[-1]["rms_ratio"] > limits.tokens.rms_factor


def test_kills_a_wrong_head_mapping(rig: Rig, limits: Thresholds) -> None:
    """Catches: a criterion blind to query heads that read another KV head."""
    ids = torch.tensor(rig.sequences)[:, :-1]
    with torch.inference_mode():
        logits = sensitivity.with_wrong_heads(rig.hf32.model)(ids).logits[:, rig.prompt - 1 :]
    result = _judge(rig, np.concatenate(list(logits.numpy())), limits)
    assert result.verdict is Verdict.INVALID
    assert result.measurements["failing_rows"].value == len(rig.sequences) * (ids.shape[1] - rig.prompt + 1)


# -- constructed rows

N, V = 200, 32
STEP = 1e-5  # HuggingFace float32's error on each constructed logit


def _constructed() -> dict[str, Any]:
    """Rows whose greedy token is 0 with a margin of 1, and an engine with errors of HuggingFace's own size."""
    draw = np.random.default_rng(0)
    hf64 = np.zeros((N, V))
    hf64[:, 0], hf64[:, 2:] = 1.0, draw.uniform(-3, 0, (N, V - 2))
    hf32 = hf64 + STEP * draw.choice([-1.0, 1.0], (N, V))
    logits = hf64 + STEP * draw.choice([-1.0, 1.0], (N, V))
    return {"logits": logits, "hf64": hf64, "hf32": hf32, "emitted": np.zeros(N, dtype=np.int64)}


def _near_tie(rows: dict[str, Any], i: int, gap: float) -> None:
    """Row i: token 1 lies ``gap`` below token 0 in both oracles; the engine ranks and emits it first."""
    rows["hf64"][i, 1] = rows["hf64"][i, 0] - gap
    rows["hf32"][i, :2] = rows["hf64"][i, :2] + STEP
    rows["logits"][i, 0], rows["logits"][i, 1] = rows["hf64"][i, 0] - gap, rows["hf64"][i, 0]
    rows["emitted"][i] = 1


def test_a_tie_is_counted_and_accepted(limits: Thresholds) -> None:
    """Catches: an honest tie reported as a failure, or not counted."""
    rows = _constructed()
    _near_tie(rows, 17, 1.9 * STEP)
    result = check_tokens(**rows, thresholds=limits.tokens)
    assert result.ok(), result
    assert result.measurements["ties"].value == 1
    assert result.measurements["ties"].limit == limits.tokens.ties.maximum


@pytest.mark.parametrize("confidence", [0.5, 0.99])
def test_what_was_measured_is_told(limits: Thresholds, confidence: float) -> None:
    """Catches: a bound or a yardstick of another confidence or percentile than the registered one, or of other rows."""
    rows = _constructed()
    rows["hf32"] = rows["hf64"] + np.linspace(1, 2, N)[:, None] * (rows["hf32"] - rows["hf64"])
    _near_tie(rows, 17, 1.9 * STEP)
    rows["logits"][40] += 1.0 + np.arange(V) % 2
    thresholds = limits.tokens.model_copy(update={"confidence": confidence, "reference_percentile": 90.0})
    measured = check_tokens(**rows, thresholds=thresholds).measurements
    errors = np.sqrt(np.mean((rows["hf32"] - rows["hf64"]) ** 2, axis=1))
    expected = measure_yardstick(errors, 0.0, percentile=90.0, confidence=confidence)
    told = [float(measured[f"hf32_p99{name}"].value) for name in ("", "_low", "_high")]
    assert told == pytest.approx([expected.value, expected.low, expected.high])
    for name, count in (("failing_rows", 1), ("ties", 1)):
        bound = measured[f"{name}_upper"]
        assert measured[name].value == count
        assert (bound.value, bound.n) == (clopper_pearson(count, N, confidence)[1], N)
        assert bound.unit == f"fraction, {confidence:g} bound"


def test_each_figure_has_its_unit_limit_and_number(limits: Thresholds) -> None:
    """Catches: a figure of the report in another unit, under another limit, or of other rows than it is of."""
    rows = _constructed()
    _near_tie(rows, 17, 1.9 * STEP)
    drawn = 50  # whose choice is not judged
    greedy = np.arange(N) < N - drawn
    measured = check_tokens(**rows, thresholds=limits.tokens, greedy=greedy).measurements
    told = {name: (m.unit, m.limit, m.n) for name, m in measured.items()}
    bound, judged = f"fraction, {limits.tokens.confidence:g} bound", N - drawn
    assert told == {
        "rows": ("rows", limits.tokens.min_rows, None),
        "worst_rms_ratio": ("ratio", limits.tokens.rms_factor, N),
        "median_rms_ratio": ("ratio", None, N),
        "failing_rows": ("rows", 0, N),
        "failing_rows_upper": (bound, None, N),
        **dict.fromkeys(("hf32_p99", "hf32_p99_low", "hf32_p99_high"), ("RMS logit", None, N)),
        "greedy_rows": ("rows", None, N),
        **{f"divergences_{kind}": ("rows", 0, judged) for kind in ("numeric", "corruption", "unexplained")},
        "not_own_argmax": ("rows", 0, judged),
        "wrong_tokens_upper": (bound, None, judged),
        "ties": ("rows", limits.tokens.ties.maximum, judged),
        "ties_upper": (bound, None, judged),
    }
    assert (measured["rows"].value, measured["greedy_rows"].value) == (N, judged)
    assert [name for name, m in measured.items() if m.limit_is == "min"] == ["rows"]


def test_more_ties_than_registered_fail(limits: Thresholds) -> None:
    """Catches: a systematic preference hidden among ties."""
    rows = _constructed()
    for i in range(limits.tokens.ties.maximum + 1):
        _near_tie(rows, i, 0.5 * STEP)
    result = check_tokens(**rows, thresholds=limits.tokens)
    assert (result.verdict, result.clause) == (Verdict.INVALID, "ties")


def test_a_regret_beyond_the_bound_is_numeric(limits: Thresholds) -> None:
    """Catches: the engine's own error used as the bound, by which any flip explains itself."""
    rows = _constructed()
    _near_tie(rows, 17, 2.5 * STEP)
    result = check_tokens(**rows, thresholds=limits.tokens)
    assert (result.verdict, result.clause) == (Verdict.INVALID, "divergence")
    witness: Any = result.witness
    assert (witness["count"], witness["rows"][0]["row"], witness["rows"][0]["class"]) == (1, 17, "numeric")


def test_a_token_that_does_not_follow_from_its_logits_is_unexplained(limits: Thresholds) -> None:
    """Catches: a sampler, ring or stream that hands out another token than the logits say, also in a near tie."""
    rows = _constructed()
    rows["emitted"][5] = 9
    _near_tie(rows, 6, 0.5 * STEP)
    rows["logits"][6, 0] = rows["logits"][6, 1] + STEP
    result = check_tokens(**rows, thresholds=limits.tokens)
    assert (result.verdict, result.clause) == (Verdict.INVALID, "divergence")
    assert result.measurements["divergences_unexplained"].value == 2


def test_the_reference_token_by_luck_is_a_fault_all_the_same(limits: Thresholds) -> None:
    """Catches: a token that is right although the engine's own argmax is another (host recomputed it, say)."""
    rows = _constructed()
    _near_tie(rows, 17, 0.5 * STEP)
    rows["emitted"][17] = 0
    result = check_tokens(**rows, thresholds=limits.tokens)
    assert (result.verdict, result.clause) == (Verdict.INVALID, "divergence")


def test_a_wrong_row_is_corruption_and_is_named(limits: Thresholds) -> None:
    """Catches: one bad row in a run that is diluted by the others."""
    rows = _constructed()
    rows["logits"][42] = np.roll(rows["logits"][42], 1)
    rows["emitted"][42] = 1
    names: Any = [{"request": "r", "index": i} for i in range(N)]
    result = check_tokens(**rows, thresholds=limits.tokens, names=names)
    witness: Any = result.witness
    assert result.verdict is Verdict.INVALID
    assert result.measurements["divergences_corruption"].value == 1
    assert witness["count"] == 1
    assert witness["rows"][0] | {"row": 42, "index": 42, "class": "corruption"} == witness["rows"][0]


def test_one_bad_logit_in_a_row_is_seen(limits: Thresholds) -> None:
    """Catches: an RMS over the vocabulary that hides one wrong column of the output projection."""
    rows = _constructed()
    rows["logits"][42, 20] += 1e-3
    assert check_tokens(**rows, thresholds=limits.tokens).clause == "logits"


@pytest.mark.parametrize(("own", "engine", "ok"), [(4.3, 9.2, True), (4.3, 35.0, False), (0.5, 9.2, False)])
def test_a_row_that_float32_loses_more_in(limits: Thresholds, own: float, engine: float, ok: bool) -> None:
    """Catches: a false alarm in a row where HuggingFace float32 itself is far from float64 (SmolLM2, seed 402: 4.3 and
    9.2 times its p99), or one that may then be as wrong as it likes; a row's own small error taken for its limit."""
    rows = _constructed()
    for name, times in (("hf32", own), ("logits", engine)):
        rows[name][42] = rows["hf64"][42] + times * (rows[name][42] - rows["hf64"][42])
    result = check_tokens(**rows, thresholds=limits.tokens)
    assert (result.ok(), result.clause) == (ok, "criterion" if ok else "logits"), result
    assert result.measurements["worst_rms_ratio"].value == pytest.approx(engine / max(own, 1.0), rel=0.01)


def test_sampled_rows_are_judged_by_their_logits_only(limits: Thresholds) -> None:
    """Catches: a sampled token held against argmax, or sampled rows left out of the RMS rule."""
    rows = _constructed()
    rows["emitted"][::2] = 9
    greedy = np.arange(N) % 2 == 1
    assert check_tokens(**rows, thresholds=limits.tokens, greedy=greedy).ok()
    rows["logits"][40, 3] += 1.0
    assert check_tokens(**rows, thresholds=limits.tokens, greedy=greedy).clause == "logits"
    assert check_tokens(**_constructed(), thresholds=limits.tokens, greedy=False).ok()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e200])
def test_logits_that_are_not_finite_fail(limits: Thresholds, value: float) -> None:
    """Catches: comparisons with NaN, which are all false, read as a pass; an exception, for a caller who has NumPy
    raise, where the square of an error is beyond float64."""
    rows = _constructed()
    rows["logits"][3, 5] = value
    with np.errstate(all="raise", under="ignore"):
        result = check_tokens(**rows, thresholds=limits.tokens)
    assert (result.verdict, result.clause) == (Verdict.INVALID, "logits")


def test_what_decides_nothing_is_unknown(limits: Thresholds) -> None:
    """Catches: a pass on too few rows, or on an oracle that broke."""
    rows = _constructed()
    least = limits.tokens.min_rows
    few = check_tokens(**{name: a[: least - 1] for name, a in rows.items()}, thresholds=limits.tokens)
    assert few.verdict is Verdict.UNKNOWN
    assert few.measurements == {"rows": Measurement(least - 1, "rows", least, limit_is="min")}
    none = {name: a[:0] for name, a in rows.items()}
    assert check_tokens(**none, thresholds=limits.tokens).verdict is Verdict.UNKNOWN
    rows["hf32"][0, 0] = np.nan
    assert check_tokens(**rows, thresholds=limits.tokens).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("token", [-1, V])
def test_a_token_outside_the_vocabulary_fails(limits: Thresholds, token: int) -> None:
    """Catches: a padded column of the output projection that was sampled, or an index that wraps."""
    rows = _constructed()
    rows["emitted"][7] = token
    names: Any = [{"request": "r", "index": i} for i in range(N)]
    result = check_tokens(**rows, thresholds=limits.tokens, names=names)
    assert (result.verdict, result.clause) == (Verdict.INVALID, "vocabulary")
    assert result.witness == {"row": 7, "request": "r", "index": 7}


def test_pooled_requests_give_the_verdict_of_all_rows(limits: Thresholds) -> None:
    """Catches: rows lost or reordered when requests are pooled, or a fault of a short request that nobody judges."""
    rows = _constructed()
    rows["logits"][120, 3] += 1.0
    parts = [
        score_tokens(**{name: a[start:stop] for name, a in rows.items()}, names=[{"n": i} for i in range(start, stop)])
        for start, stop in ((0, 70), (70, 71), (71, N))
    ]
    result = judge_tokens(TokenScores.concatenate(parts), limits.tokens)
    witness: Any = result.witness
    assert witness["rows"][0]["n"] == 120
    whole = check_tokens(**rows, thresholds=limits.tokens)
    assert result.measurements == whole.measurements


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Catches: broadcasting that compares rows of different requests."""
    rows = _constructed()
    for change in ({"logits": rows["logits"][:1]}, {"emitted": rows["emitted"][:-1]}, {"hf64": rows["hf64"][0]}):
        with pytest.raises(ValueError, match=r"fit|expected"):
            score_tokens(**{**copy.copy(rows), **change})
    with pytest.raises(ValueError, match="bool"):
        score_tokens(**rows, greedy=np.ones(N, dtype=np.int64))
