"""Token equivalence in float32 strict mode.

For row i over the vocabulary v, with ``b`` the engine's float32 logits, ``h`` HuggingFace float32, ``r`` float64:

* row error ``E_i = sqrt(mean_v (b - r)^2)``; ``H_i`` the same for ``h``. Yardstick ``Y`` = p99 of H over the rows.
  A row passes if ``E_i <= k max(Y, H_i)``, whether its token was greedy or sampled: where float32 loses more than it
  mostly does, any correct run may. Faults do not move H. Where one run of h may have been lucky H and B are the largest
  of several (`properties/own_error.py`).
* the row's measured error bound ``B_i = max_v |h - r|``: the largest error of HuggingFace float32 on this row. The
  maximum, not the RMS: if each logit of a run is within B of the truth then the token that this run ranks first has a
  true regret of at most 2B, so a larger regret cannot come from errors of the measured size, while an RMS bound would
  reject honest ties. It comes from HuggingFace and never from the engine: with the engine's own error as bound the
  same inequality holds for any logits whatever, and every corruption would be a tie.
* regret ``R_i = max_v h - h[emitted]``, the emitted token's own, in float32.
* a divergence is a greedy token that is not the lowest-id argmax of ``r``. It is a tie only if the row passes, the
  token is the lowest-id argmax of the engine's own logits, and ``R_i <= 2 B_i``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verification.criterion.yardstick import Float, Yardstick, clopper_pearson, measure_yardstick, ratio
from verification.result import JSON, CheckResult, Measurement, Verdict, merge
from verification.thresholds import TokenThresholds

TOKEN_PROPERTY = "token-equivalence"
_LISTED = 8  # rows named in a witness
_BLOCK = 64  # rows reduced at a time: a vocabulary of 50,000 in float64 is 0.4 MB a row


class Divergence(StrEnum):
    """Why an emitted token is not the reference's. Only ``tie`` is acceptable."""

    TIE = "tie"
    NUMERIC = "numeric"  # the row passes and the token follows from it, but its regret is beyond the bound
    CORRUPTION = "corruption"  # the row's logits are wrong
    UNEXPLAINED = "unexplained"  # the row passes, but the token is not its argmax: sampler, ring or stream


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the criterion needs of N rows; a few numbers a row, so that the rows of a whole run can be pooled.

    engine_rms, hf32_rms: row errors [N] (not finite if the logits are not). reference_square: mean square of the
    reference row [N]. bound, regret: as in the module's definitions [N]. emitted, reference_token, engine_token: int64
    [N]. greedy: bool [N]. names: one mapping a row for witnesses (request, index). vocabulary: size.
    """

    engine_rms: Float
    hf32_rms: Float
    reference_square: Float
    bound: Float
    regret: Float
    emitted: NDArray[np.int64]
    reference_token: NDArray[np.int64]
    engine_token: NDArray[np.int64]
    greedy: NDArray[np.bool_]
    names: tuple[Mapping[str, JSON], ...]
    vocabulary: int

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def concatenate(cls, parts: Iterable[TokenScores]) -> TokenScores:
        """Pool the rows of several requests of one model. ``ValueError`` for none, or for different vocabularies."""
        items = list(parts)
        sizes = {item.vocabulary for item in items}
        if len(sizes) != 1:
            raise ValueError(f"cannot pool rows of {len(items)} requests with vocabularies {sorted(sizes)}")

        def join(field: str) -> NDArray[np.float64]:
            return np.concatenate([getattr(item, field) for item in items])

        arrays = {name: join(name) for name in cls.__slots__ if name not in ("names", "vocabulary")}
        return cls(**arrays, names=tuple(n for item in items for n in item.names), vocabulary=sizes.pop())  # type: ignore[arg-type]


def score_tokens(
    *,
    logits: ArrayLike,
    hf64: ArrayLike,
    hf32: ArrayLike,
    emitted: ArrayLike,
    greedy: ArrayLike | bool = True,
    names: Sequence[Mapping[str, JSON]] | None = None,
) -> TokenScores:
    """Reduce N rows of logits [N, V] to their scores.

    logits: the engine's, float32. hf64, hf32: HuggingFace by teacher forcing over the engine's own tokens. emitted: ids
    [N]. greedy: bool, or bool [N]; False for a token drawn at a temperature above zero, whose row is judged but not its
    choice. names: what to call each row in a witness. ``ValueError`` for shapes that do not fit.
    """
    matrices = [np.asarray(a) for a in (logits, hf64, hf32)]
    engine, reference, ordinary = matrices
    tokens = np.asarray(emitted)
    n = len(tokens)
    if reference.ndim != 2 or {a.shape for a in matrices} != {(n, reference.shape[-1])}:
        raise ValueError(f"logits {engine.shape}, hf64 {reference.shape}, hf32 {ordinary.shape} do not fit {n} tokens")
    if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or n == 0):
        raise ValueError(f"emitted must be integers [N], found {tokens.dtype} {tokens.shape}")
    choice = np.broadcast_to(np.asarray(greedy), (n,))
    if choice.dtype != np.bool_:
        raise ValueError(f"greedy must be bool, found {choice.dtype}")
    if names is not None and len(names) != n:
        raise ValueError(f"{len(names)} names for {n} rows")

    vocabulary = reference.shape[1]
    inside = np.clip(tokens, 0, vocabulary - 1).astype(np.int64)  # a foreign id is judged by judge_tokens
    parts: list[Float] = [np.empty((5, 0))]  # of each block, the five columns below
    chosen: list[NDArray[np.int64]] = [np.empty((2, 0), np.int64)]
    for start in range(0, n, _BLOCK):
        block = slice(start, min(start + _BLOCK, n))
        b, r, h = (a[block].astype(np.float64) for a in matrices)
        own = np.abs(h - r)
        with np.errstate(invalid="ignore", over="ignore"):
            columns = (
                np.sqrt(np.mean(np.square(b - r), axis=1)),
                np.sqrt(np.mean(np.square(own), axis=1)),
                np.mean(np.square(r), axis=1),
                own.max(axis=1),
                h.max(axis=1) - h[np.arange(len(h)), inside[block]],
            )
        parts.append(np.stack(columns))
        chosen.append(np.stack((r.argmax(axis=1), np.where(np.isnan(b), -np.inf, b).argmax(axis=1))))
    engine_rms, hf32_rms, square, bound, regret = np.concatenate(parts, axis=1)
    reference_token, engine_token = np.concatenate(chosen, axis=1)
    return TokenScores(
        engine_rms=engine_rms,
        hf32_rms=hf32_rms,
        reference_square=square,
        bound=bound,
        regret=regret,
        emitted=tokens.astype(np.int64),
        reference_token=reference_token,
        engine_token=engine_token,
        greedy=np.array(choice),
        names=tuple(names) if names is not None else tuple({} for _ in range(n)),
        vocabulary=vocabulary,
    )


def judge_tokens(scores: TokenScores, thresholds: TokenThresholds) -> CheckResult:
    """Decide ``token-equivalence`` over the pooled rows of a run.

    ``invalid``: a row beyond the factor or not finite, a divergence that is no tie, a token that is not the argmax of
    the engine's own logits, an id outside the vocabulary, or more ties than registered. ``unknown``: fewer rows than
    the thresholds ask for, or an oracle that is not finite.
    """
    n = len(scores)
    outside = np.flatnonzero((scores.emitted < 0) | (scores.emitted >= scores.vocabulary))
    if outside.size:
        i = int(outside[0])
        message = f"token {scores.emitted[i]} is outside the vocabulary of {scores.vocabulary} ({outside.size} rows)"
        return _result(Verdict.INVALID, "vocabulary", message, {"row": i, **scores.names[i]})
    if not (np.isfinite(scores.hf32_rms).all() and np.isfinite(scores.reference_square).all()):
        return _result(Verdict.UNKNOWN, "oracle", "the oracle's own logits are not finite")
    if n < thresholds.min_rows:
        message = f"{n} rows give no {thresholds.reference_percentile:g}th percentile; {thresholds.min_rows} are needed"
        return _result(
            Verdict.UNKNOWN, "rows", message, {}, {"rows": Measurement(n, "rows", thresholds.min_rows, limit_is="min")}
        )
    yardstick = measure_yardstick(
        scores.hf32_rms,
        float(np.sqrt(np.mean(scores.reference_square))),
        percentile=thresholds.reference_percentile,
        confidence=thresholds.confidence,
    )
    # A row in which float32 loses more than it mostly does is measured by what HuggingFace's own lost there.
    ratios = ratio(scores.engine_rms, np.maximum(yardstick.value, scores.hf32_rms))
    failing = ~(ratios <= thresholds.rms_factor)  # also where the ratio is NaN
    not_own = scores.greedy & (scores.emitted != scores.engine_token)
    classes = {int(i): _classify(scores, int(i), failing, not_own, thresholds) for i in _diverged(scores)}
    describer = _Describer(scores, ratios, classes)
    results = [
        _judge_rows(ratios, failing, yardstick, thresholds, describer),
        _judge_divergences(scores, failing, not_own, classes, thresholds, describer),
        _judge_ties(scores, classes, thresholds, describer),
    ]
    merged = merge(results)
    if not merged.ok():
        return merged
    message = "; ".join(item.message for item in results)
    return _result(merged.verdict, "criterion", message, {}, dict(merged.measurements))


def check_tokens(
    *,
    logits: ArrayLike,
    hf64: ArrayLike,
    hf32: ArrayLike,
    emitted: ArrayLike,
    thresholds: TokenThresholds,
    greedy: ArrayLike | bool = True,
    names: Sequence[Mapping[str, JSON]] | None = None,
) -> CheckResult:
    """``judge_tokens`` of ``score_tokens``, for rows that fit in memory together."""
    scores = score_tokens(logits=logits, hf64=hf64, hf32=hf32, emitted=emitted, greedy=greedy, names=names)
    return judge_tokens(scores, thresholds)


def _diverged(scores: TokenScores) -> NDArray[np.int64]:
    return np.flatnonzero(scores.greedy & (scores.emitted != scores.reference_token))


def _classify(
    scores: TokenScores,
    i: int,
    failing: NDArray[np.bool_],
    not_own: NDArray[np.bool_],
    thresholds: TokenThresholds,
) -> Divergence:
    if failing[i]:
        return Divergence.CORRUPTION
    if not_own[i]:
        return Divergence.UNEXPLAINED
    if scores.regret[i] <= thresholds.regret_factor * scores.bound[i]:
        return Divergence.TIE
    return Divergence.NUMERIC


@dataclass(frozen=True, slots=True)
class _Describer:
    """Turns row numbers into witness entries."""

    scores: TokenScores
    ratios: Float
    classes: Mapping[int, Divergence]

    def witness(self, rows: NDArray[np.int64]) -> dict[str, JSON]:
        if rows.size == 0:
            return {}
        return {"count": int(rows.size), "rows": [self._row(int(i)) for i in rows[:_LISTED]]}

    def _row(self, i: int) -> JSON:
        s = self.scores
        return {
            "row": i,
            **s.names[i],
            "token": int(s.emitted[i]),
            "reference_token": int(s.reference_token[i]),
            "engine_argmax": int(s.engine_token[i]),
            "rms_ratio": float(self.ratios[i]),
            "regret": float(s.regret[i]),
            "bound": float(s.bound[i]),
            "class": self.classes[i].value if i in self.classes else None,
        }


def _judge_rows(
    ratios: Float,
    failing: NDArray[np.bool_],
    yardstick: Yardstick,
    thresholds: TokenThresholds,
    describer: _Describer,
) -> CheckResult:
    n = len(ratios)
    order = np.argsort(-np.where(np.isnan(ratios), np.inf, ratios), kind="stable")
    worst, bad = int(order[0]), int(failing.sum())
    message = (
        f"{bad} of {n} rows have an RMS logit error above {thresholds.rms_factor:g}x HuggingFace float32's "
        f"p{thresholds.reference_percentile:g}, or its error in that row if larger (worst ratio {ratios[worst]:.4g}, "
        f"row {worst})"
    )
    upper = clopper_pearson(bad, n, thresholds.confidence)[1]
    bound_unit = f"fraction, {thresholds.confidence:g} bound"
    measurements = {
        "rows": Measurement(n, "rows", thresholds.min_rows, limit_is="min"),
        "worst_rms_ratio": Measurement(float(ratios[worst]), "ratio", thresholds.rms_factor, n),
        "median_rms_ratio": Measurement(float(np.median(ratios)), "ratio", n=n),
        "failing_rows": Measurement(bad, "rows", 0, n),
        "failing_rows_upper": Measurement(upper, bound_unit, n=n),
        "hf32_p99": Measurement(yardstick.value, "RMS logit", n=yardstick.rows),
        "hf32_p99_low": Measurement(yardstick.low, "RMS logit", n=yardstick.rows),
        "hf32_p99_high": Measurement(yardstick.high, "RMS logit", n=yardstick.rows),
    }
    verdict = Verdict.INVALID if bad else Verdict.VALID
    return _result(verdict, "logits", message, describer.witness(order[:bad]), measurements)


def _judge_divergences(
    scores: TokenScores,
    failing: NDArray[np.bool_],
    not_own: NDArray[np.bool_],
    classes: Mapping[int, Divergence],
    thresholds: TokenThresholds,
    describer: _Describer,
) -> CheckResult:
    counts = Counter(classes.values())
    greedy = int(scores.greedy.sum())
    rejected = np.array([i for i, kind in classes.items() if kind is not Divergence.TIE], dtype=np.int64)
    # The reference's token, but not the argmax of the engine's own passing logits: right by luck, and a fault.
    stray = np.setdiff1d(np.flatnonzero(not_own & ~failing), np.array(list(classes), dtype=np.int64))
    message = f"{len(classes)} of {greedy} greedy tokens differ from float64's argmax ("
    message += ", ".join(f"{counts[kind]} {kind.value}" for kind in Divergence) + ")"
    if stray.size:
        message += f"; {stray.size} more are not the argmax of the engine's own logits"
    bad = rejected.size + stray.size
    measurements = {
        "greedy_rows": Measurement(greedy, "rows", n=len(scores)),
        **{
            f"divergences_{kind.value}": Measurement(counts[kind], "rows", 0, greedy)
            for kind in (Divergence.NUMERIC, Divergence.CORRUPTION, Divergence.UNEXPLAINED)
        },
        "not_own_argmax": Measurement(int(not_own.sum()), "rows", 0, greedy),
        "wrong_tokens_upper": Measurement(
            clopper_pearson(bad, greedy, thresholds.confidence)[1],
            f"fraction, {thresholds.confidence:g} bound",
            n=greedy,
        ),
    }
    witness = describer.witness(np.concatenate([rejected, stray]))
    return _result(Verdict.INVALID if bad else Verdict.VALID, "divergence", message, witness, measurements)


def _judge_ties(
    scores: TokenScores, classes: Mapping[int, Divergence], thresholds: TokenThresholds, describer: _Describer
) -> CheckResult:
    greedy = int(scores.greedy.sum())
    tied = np.array([i for i, kind in classes.items() if kind is Divergence.TIE], dtype=np.int64)
    allowed = thresholds.ties.allowed(greedy)
    measurements = {
        "ties": Measurement(int(tied.size), "rows", allowed, greedy),
        "ties_upper": Measurement(
            clopper_pearson(int(tied.size), greedy, thresholds.confidence)[1],
            f"fraction, {thresholds.confidence:g} bound",
            n=greedy,
        ),
    }
    too_many = tied.size > allowed
    message = f"{tied.size} ties in {greedy} greedy rows, at most {allowed} registered"
    return _result(
        Verdict.INVALID if too_many else Verdict.VALID,
        "ties",
        message,
        describer.witness(tied) if too_many else {},
        measurements,
    )


def _result(
    verdict: Verdict,
    clause: str,
    message: str,
    witness: dict[str, JSON] | None = None,
    measurements: dict[str, Measurement] | None = None,
) -> CheckResult:
    return CheckResult(verdict, TOKEN_PROPERTY, clause, message, witness or {}, measurements or {})
