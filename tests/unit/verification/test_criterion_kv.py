"""The KV criterion: names the row, and accepts other correct float32 runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from verification.criterion import KVScores, check_kv, judge_kv, score_kv
from verification.criterion.yardstick import clopper_pearson
from verification.models.sensitivity import rotate
from verification.oracles.hf import HFOracle
from verification.result import CheckResult, Measurement, Verdict
from verification.thresholds import Thresholds, load_thresholds

pytestmark = pytest.mark.usefixtures("well_formed")
Array = NDArray[Any]
Rig = Any  # conftest.Rig; conftest modules cannot be imported


@pytest.fixture(params=["tiny3", "tiny7"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.getfixturevalue(request.param)


def _judge(rig: Rig, k: Array, v: Array, limits: Thresholds) -> CheckResult:
    ids = rig.sequences[0]
    return check_kv(k=k, v=v, hf64=rig.hf64.kv(ids), hf32=rig.hf32.kv(ids), thresholds=limits.kv)


def test_accepts_correct_float32_runs(rig: Rig, limits: Thresholds) -> None:
    """Catches: false rejection of HuggingFace itself, of another attention kernel, or of exact rotary angles."""
    exact = HFOracle.load(rig.model.path, dtype="float32", threads=1)
    rotary = exact.model.model.rotary_emb
    frequencies = rig.hf64.model.model.rotary_emb.inv_freq

    def angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = torch.cat([position_ids[..., None].double() * frequencies] * 2, dim=-1)
        return turned.cos().to(x.dtype), turned.sin().to(x.dtype)

    rotary.forward = angles
    sdpa = HFOracle.load(rig.model.path, dtype="float32", attention="sdpa", threads=1)
    for oracle in (rig.hf32, sdpa, exact):
        k, v = oracle.kv(rig.sequences[0])
        result = _judge(rig, k, v, limits)
        assert result.ok(), result
        for kind in "kv":
            assert float(result.measurements[f"{kind}_worst_rms_ratio"].value) < limits.kv.rms_factor / 1.5


def test_plain_float64_would_reject_exact_angles(limits: Thresholds, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Catches: a reference that shares its float32 rotary angles with the yardstick (why Float64Islands is there)."""
    rng = np.random.default_rng(0)
    frequencies = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    base = torch.from_numpy(rng.standard_normal((1, 480, 2, 16)))
    position = torch.arange(480)[None, :, None, None]

    def turn(angle: torch.Tensor) -> Array:
        first, second = base.chunk(2, dim=-1)
        return (base * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()).numpy()

    both = torch.from_numpy(np.concatenate([frequencies] * 2))
    exact = turn(position.double() * both)
    rounded = turn((position.float() * both.float()).double())
    hf32 = rounded.astype(np.float32)

    def verdict(reference: Array) -> Verdict:
        engine = exact.astype(np.float32)
        kv = (reference, reference), (hf32, hf32)
        return check_kv(k=engine, v=engine, hf64=kv[0], hf32=kv[1], thresholds=limits.kv).verdict

    assert verdict(exact) is Verdict.VALID
    assert verdict(rounded) is Verdict.INVALID


def _foreign_row(k: Array, v: Array, other: tuple[Array, Array], rig: Rig) -> None:
    k[1, 29, 0], v[1, 29, 0] = other[0][1, 29, 0], other[1][1, 29, 0]


def _foreign_v_row(k: Array, v: Array, other: tuple[Array, Array], rig: Rig) -> None:
    v[1, 29, 0] = other[1][1, 29, 0]


def _wrong_position(k: Array, v: Array, other: tuple[Array, Array], rig: Rig) -> None:
    angle = torch.cat([rig.hf32.model.model.rotary_emb.inv_freq] * 2)
    k[1, 29, 0] = rotate(torch.from_numpy(k[1, 29, 0].copy()), angle).numpy()


@pytest.mark.parametrize(("plant", "kinds"), [(_foreign_row, "kv"), (_foreign_v_row, "v"), (_wrong_position, "k")])
def test_one_wrong_row_is_named(rig: Rig, limits: Thresholds, plant: Callable[..., None], kinds: str) -> None:
    """Catches: one foreign or wrongly rotated row of one head of one layer that drowns among thousands."""
    k, v = (a.copy() for a in rig.hf32.kv(rig.sequences[0]))
    plant(k, v, rig.hf32.kv(rig.sequences[1]), rig)
    result = _judge(rig, k, v, limits)
    assert result.verdict is Verdict.INVALID
    for kind in "kv":
        assert result.measurements[f"{kind}_failing_rows"].value == (1 if kind in kinds else 0)
    witness: Any = result.witness
    assert witness["count"] == 1
    row = witness["rows"][0]
    assert (row["kind"], row["layer"], row["position"], row["head"]) == (kinds[0], 1, 29, 0)
    assert row["rms_ratio"] > 100 * limits.kv.rms_factor
    assert witness["positions"] == [29]


def test_swapped_pages_are_named(rig: Rig, limits: Thresholds) -> None:
    """Catches: two entries of a block table exchanged, which attention, and so the tokens, cannot show."""
    k, v = (a.copy() for a in rig.hf32.kv(rig.sequences[0]))
    order = np.r_[16:32, 0:16, 32 : k.shape[1]]
    result = _judge(rig, k[:, order], v[:, order], limits)
    witness: Any = result.witness
    assert result.verdict is Verdict.INVALID
    assert witness["positions"] == list(range(32))


def test_exchanged_heads_and_stale_poison_fail(rig: Rig, limits: Thresholds) -> None:
    """Catches: KV heads written to each other's place; a row never written, which still holds the pool's NaN."""
    k, v = (a.copy() for a in rig.hf32.kv(rig.sequences[0]))
    assert _judge(rig, k[:, :, ::-1], v[:, :, ::-1], limits).verdict is Verdict.INVALID
    k[0, 5] = np.nan
    result = _judge(rig, k, v, limits)
    witness: Any = result.witness
    assert result.verdict is Verdict.INVALID
    assert (witness["positions"], witness["rows"][0]["rms_ratio"]) == ([5], "nan")


def test_pooled_requests_keep_their_names(rig: Rig, limits: Thresholds) -> None:
    """Catches: short requests that nobody judges, and a witness that names the wrong request or position."""
    parts = []
    for number, ids in enumerate(rig.sequences):
        short = ids[: 12 + number]
        k, v = (a.copy() for a in rig.hf32.kv(short))
        if number == 4:
            k[1, 7, 1] += 1.0
        hf64, hf32 = rig.hf64.kv(short), rig.hf32.kv(short)
        parts.append(score_kv(k=k, v=v, hf64=hf64, hf32=hf32, name={"request": f"r{number}"}))
    short_of_rows = judge_kv(parts[4], limits.kv)
    assert short_of_rows.verdict is Verdict.UNKNOWN
    few = Measurement(16 * rig.hf32.kv(rig.sequences[4][:16])[0].shape[2], "rows", limits.kv.min_rows, limit_is="min")
    assert short_of_rows.measurements == {"k_rows_per_layer": few, "v_rows_per_layer": few}
    witness: Any = judge_kv(KVScores.concatenate(parts), limits.kv).witness
    assert witness["count"] == 1
    assert witness["rows"][0] | {"request": "r4", "layer": 1, "position": 7, "head": 1} == witness["rows"][0]


def test_shapes_and_oracle_faults(rig: Rig, limits: Thresholds) -> None:
    """Catches: broadcasting over a missing axis, and a pass on an oracle that broke."""
    k, v = rig.hf32.kv(rig.sequences[0])
    with pytest.raises(ValueError, match="shape"):
        _judge(rig, k[:, :, :1], v, limits)
    broken = k.copy()
    broken[0, 0, 0, 0] = np.inf
    result = check_kv(k=k, v=v, hf64=(broken, v), hf32=(k, v), thresholds=limits.kv)
    assert result.verdict is Verdict.UNKNOWN


def test_rows_are_compared_in_float64() -> None:
    """Catches: errors of rows that come in a narrower type and are subtracted, or squared, in that type."""
    one, step = np.ones((1, 1, 1, 1), np.float32), np.float32(2.0**-23)
    tiny = np.full((1, 1, 1, 1), 1e-30, np.float32)  # its square is no float32
    pair = (one, tiny)
    scores = score_kv(k=one + step, v=np.float16(one) * 2, hf64=pair, hf32=(one - step, one))
    assert scores.engine_rms.reshape(2).tolist() == [2.0**-23, 2.0 - float(tiny[0, 0, 0, 0])]
    assert scores.reference_square.reshape(2).tolist() == [1.0, float(tiny[0, 0, 0, 0]) ** 2]


def test_an_ill_conditioned_row_is_held_against_its_own_error() -> None:
    """A row on which HuggingFace float32 errs most may err alike in the engine, and not 8 times as much.

    Catches: one V row in 39,240 of SmolLM2, 2.2 times HuggingFace's own error there, called corruption by
    the layer's p99 (seed 42242999201010).
    """
    limits = load_thresholds().kv
    shape = (2, 1, 200, 1)
    own = np.full(shape, 1e-7)
    own[:, 0, 80] = 6e-7
    for factor, verdict in ((2.2, Verdict.VALID), (9.0, Verdict.INVALID)):
        engine = own.copy()
        engine[:, 0, 80] *= factor
        scores = KVScores(engine, own, np.ones(shape), np.arange(200), tuple({} for _ in range(200)))
        assert judge_kv(scores, limits).verdict is verdict, factor


def test_each_figure_has_its_value_unit_limit_and_number() -> None:
    """Catches: a figure of the report that is wrong, in another unit, under another limit, or of other rows than it is
    of."""
    limits = load_thresholds().kv
    rows, shape = 400, (2, 2, 200, 1)
    own = np.full(shape, 2.0**-23)
    own[:, 1] *= 2  # the second layer's yardstick; all values are exact
    engine = own * 1.5
    engine[0, 1, 30] *= 8  # a row of K
    measured = judge_kv(KVScores(engine, own, np.ones(shape), np.arange(200), ({},) * 200), limits).measurements
    for kind, failing, worst in (("k", 1, 12.0), ("v", 0, 1.5)):
        upper = clopper_pearson(failing, rows, limits.confidence)[1]
        expected = {
            "rows": Measurement(rows, "rows"),
            "worst_rms_ratio": Measurement(worst, "ratio", limits.rms_factor, rows),
            "median_rms_ratio": Measurement(1.5, "ratio", n=rows),
            "failing_rows": Measurement(failing, "rows", 0, rows),
            "failing_rows_upper": Measurement(upper, f"fraction, {limits.confidence:g} bound", n=rows),
            "hf32_p99_least": Measurement(2.0**-23, "RMS", n=200),
            "hf32_p99_most": Measurement(2.0**-22, "RMS", n=200),
        }
        found = {name.removeprefix(f"{kind}_"): m for name, m in measured.items() if name.startswith(f"{kind}_")}
        assert found == expected
