"""KV content: K and V gathered from the engine's pages against HuggingFace's ``past_key_values``.

A row is one head of one position of one layer. Its RMS error against float64 is held against the p99 of HuggingFace
float32's row errors in the same layer, K and V apart, because errors grow with depth; a row on which HuggingFace
float32 itself is further off is held against that error, which says how ill-conditioned the row is and does not depend
on the engine (`properties/own_error.py` measures it over several orders of addition, where one may have been lucky). A
foreign, swapped or wrongly rotated row is then off by thousands of yardsticks, and named by layer, position and head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verification.criterion.yardstick import Float, Yardstick, clopper_pearson, measure_yardstick, ratio, row_rms
from verification.result import JSON, CheckResult, Measurement, Verdict, merge
from verification.thresholds import KVThresholds

KV_PROPERTY = "kv-content"
_LISTED = 8  # rows named in a witness
_POSITIONS = 64  # positions listed in a witness


@dataclass(frozen=True, slots=True)
class KVScores:
    """Row errors of K and V; index 0 of the first axis is K, 1 is V.

    engine_rms, hf32_rms, reference_square: float64 [2, layers, positions, heads]. names: one mapping a position, for
    witnesses (request); ``position`` is its position in the sequence [positions].
    """

    engine_rms: Float
    hf32_rms: Float
    reference_square: Float
    position: NDArray[np.int64]
    names: tuple[Mapping[str, JSON], ...]

    @classmethod
    def concatenate(cls, parts: Iterable[KVScores]) -> KVScores:
        """Pool the positions of several requests of one model (same layers and heads)."""
        items = list(parts)
        if not items:
            raise ValueError("no KV rows to pool")
        return cls(
            engine_rms=np.concatenate([item.engine_rms for item in items], axis=2),
            hf32_rms=np.concatenate([item.hf32_rms for item in items], axis=2),
            reference_square=np.concatenate([item.reference_square for item in items], axis=2),
            position=np.concatenate([item.position for item in items]),
            names=tuple(name for item in items for name in item.names),
        )


def score_kv(
    *,
    k: ArrayLike,
    v: ArrayLike,
    hf64: tuple[ArrayLike, ArrayLike],
    hf32: tuple[ArrayLike, ArrayLike],
    name: Mapping[str, JSON] | None = None,
    first_position: int = 0,
) -> KVScores:
    """Row errors of one request.

    k, v: the engine's, [layers, positions, kv_heads, head_dim], K after the rotary embedding. hf64, hf32: the (K, V)
    pairs of HuggingFace, same shape. name: what a witness calls the request. first_position: position of row 0 in its
    sequence. ``ValueError`` for shapes that differ.
    """
    shape = np.shape(hf64[0])
    if len(shape) != 4:
        raise ValueError(f"expected [layers, positions, kv_heads, head_dim], HuggingFace gave {shape}")
    for label, array in (("k", k), ("v", v), ("hf64 v", hf64[1]), ("hf32 k", hf32[0]), ("hf32 v", hf32[1])):
        if np.shape(array) != shape:
            raise ValueError(f"{label} has shape {np.shape(array)}, HuggingFace's K has {shape}")
    columns: list[tuple[Float, Float, Float]] = []
    for engine, reference, ordinary in ((k, hf64[0], hf32[0]), (v, hf64[1], hf32[1])):
        b, r, h = (np.asarray(a, dtype=np.float64) for a in (engine, reference, ordinary))
        with np.errstate(invalid="ignore", over="ignore"):
            columns.append((row_rms(b - r), row_rms(h - r), np.mean(np.square(r), axis=-1)))
    engine_rms, hf32_rms, square = (np.stack(column) for column in zip(*columns, strict=True))
    position = first_position + np.arange(shape[1])
    return KVScores(engine_rms, hf32_rms, square, position, tuple(name or {} for _ in range(shape[1])))


def judge_kv(scores: KVScores, thresholds: KVThresholds) -> CheckResult:
    """Decide ``kv-content`` over pooled positions; K and V each give a clause, and the worse one is the verdict."""
    return merge([_judge_kind(kind, index, scores, thresholds) for index, kind in enumerate("kv")])


def check_kv(
    *,
    k: ArrayLike,
    v: ArrayLike,
    hf64: tuple[ArrayLike, ArrayLike],
    hf32: tuple[ArrayLike, ArrayLike],
    thresholds: KVThresholds,
    name: Mapping[str, JSON] | None = None,
) -> CheckResult:
    """``judge_kv`` of ``score_kv``, for one request long enough to have a yardstick of its own."""
    return judge_kv(score_kv(k=k, v=v, hf64=hf64, hf32=hf32, name=name), thresholds)


def _judge_kind(kind: str, index: int, scores: KVScores, thresholds: KVThresholds) -> CheckResult:
    engine, own, square = (a[index] for a in (scores.engine_rms, scores.hf32_rms, scores.reference_square))
    layers, positions, heads = engine.shape
    rows_per_layer = positions * heads
    if not (np.isfinite(own).all() and np.isfinite(square).all()):
        return CheckResult(Verdict.UNKNOWN, KV_PROPERTY, "oracle", f"the oracle's own {kind.upper()} is not finite")
    if layers == 0 or rows_per_layer < thresholds.min_rows:
        message = (
            f"{rows_per_layer} {kind.upper()} rows in each of {layers} layers give no "
            f"{thresholds.reference_percentile:g}th percentile; {thresholds.min_rows} are needed"
        )
        rows = Measurement(rows_per_layer, "rows", limit=thresholds.min_rows, limit_is="min")
        return CheckResult(Verdict.UNKNOWN, KV_PROPERTY, "rows", message, {}, {f"{kind}_rows_per_layer": rows})
    yardsticks = [
        measure_yardstick(
            own[layer],
            float(np.sqrt(np.mean(square[layer]))),
            percentile=thresholds.reference_percentile,
            confidence=thresholds.confidence,
        )
        for layer in range(layers)
    ]
    ratios = ratio(engine, np.maximum(np.array([y.value for y in yardsticks])[:, None, None], own))
    order = np.argsort(-np.where(np.isnan(ratios), np.inf, ratios), axis=None, kind="stable")
    failing = int((~(ratios <= thresholds.rms_factor)).sum())
    worst = _row(kind, scores, ratios, int(order[0]))
    message = (
        f"{failing} of {ratios.size} {kind.upper()} rows have an RMS error above {thresholds.rms_factor:g}x "
        f"HuggingFace float32's p{thresholds.reference_percentile:g} of the layer, or its error there (worst ratio "
        f"{worst['rms_ratio']:.4g} at layer {worst['layer']}, position {worst['position']}, head {worst['head']})"
    )
    witness: dict[str, JSON] = {}
    if failing:
        listed: list[JSON] = [_row(kind, scores, ratios, int(flat)) for flat in order[:_LISTED][:failing]]
        touched = np.unique(np.unravel_index(order[:failing], ratios.shape)[1])
        places: list[JSON] = [int(scores.position[i]) for i in touched[:_POSITIONS]]
        witness = {"count": failing, "rows": listed, "positions": places}
    return CheckResult(
        Verdict.INVALID if failing else Verdict.VALID,
        KV_PROPERTY,
        f"{kind}-rows",
        message,
        witness,
        _measurements(kind, ratios, failing, yardsticks, thresholds),
    )


def _row(kind: str, scores: KVScores, ratios: Float, flat: int) -> dict[str, JSON]:
    layer, index, head = (int(x) for x in np.unravel_index(flat, ratios.shape))
    return {
        **scores.names[index],
        "kind": kind,
        "layer": layer,
        "position": int(scores.position[index]),
        "head": head,
        "rms_ratio": float(ratios.flat[flat]),
    }


def _measurements(
    kind: str, ratios: Float, failing: int, yardsticks: list[Yardstick], thresholds: KVThresholds
) -> dict[str, Measurement]:
    n, values = ratios.size, [y.value for y in yardsticks]
    upper = clopper_pearson(failing, n, thresholds.confidence)[1]
    worst = float(np.where(np.isnan(ratios), np.inf, ratios).max())
    return {
        f"{kind}_rows": Measurement(n, "rows"),
        f"{kind}_worst_rms_ratio": Measurement(worst, "ratio", thresholds.rms_factor, n),
        f"{kind}_median_rms_ratio": Measurement(float(np.median(ratios)), "ratio", n=n),
        f"{kind}_failing_rows": Measurement(failing, "rows", 0, n),
        f"{kind}_failing_rows_upper": Measurement(upper, f"fraction, {thresholds.confidence:g} bound", n=n),
        f"{kind}_hf32_p99_least": Measurement(min(values), "RMS", n=yardsticks[0].rows),
        f"{kind}_hf32_p99_most": Measurement(max(values), "RMS", n=yardsticks[0].rows),
    }
