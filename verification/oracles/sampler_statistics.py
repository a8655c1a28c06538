"""Do drawn tokens follow the distributions they were drawn from, and independently? (design section 9, sampling)

Each test gives the p-value of a chi-square statistic; a correct sampler falls below `sampling.error_rate` of
thresholds.yaml in that fraction of uses. Tokens are mapped to numbers that are uniform for a correct sampler whatever
each row's own distribution is (the probability integral transform with randomised ties), so that rows of all kinds are
pooled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

F64 = NDArray[np.float64]

MIN_EXPECTED = 5.0  # of a cell: below, the chi-square law no longer holds (Cochran 1954)


def uniform_scores(distributions: Sequence[F64], tokens: Sequence[int], seed: int) -> F64:
    """One number in [0, 1) a row, float64 [N]: F(token - 1) + v p(token), with ids ordered by id and v uniform.

    distributions: of N rows, each float64 [V] summing to 1. tokens: N ids drawn. seed: of v. Raises ValueError for an
    id that its row gives no probability, which no statistic is needed to refuse.
    """
    if len(distributions) != len(tokens):
        raise ValueError(f"{len(distributions)} distributions for {len(tokens)} tokens")
    v = np.random.default_rng(seed).random(len(tokens))
    scores = np.empty(len(tokens))
    for i, (p, token) in enumerate(zip(distributions, tokens, strict=True)):
        if not 0 <= token < len(p) or p[token] <= 0:
            raise ValueError(f"row {i}: token {token} has no probability")
        scores[i] = p[:token].sum() + v[i] * p[token]
    return np.clip(scores, 0.0, np.nextafter(1.0, 0.0))


def pooled_cells(distributions: Sequence[F64], tokens: Sequence[int], cells: int = 32) -> float:
    """p-value: ids of all rows, each by its rank in its own row, against the sums of their probabilities.

    Ranks beyond `cells`, and trailing ones of too small an expectation, are pooled. The cell counts of rows with
    different distributions vary less than the chi-square law says, so that the error rate is at most the nominal one.
    """
    expected, observed = np.zeros(cells), np.zeros(cells)
    for p, token in zip(distributions, tokens, strict=True):
        order = np.argsort(-p, kind="stable")
        rank = int(np.flatnonzero(order == token)[0])
        observed[min(rank, cells - 1)] += 1
        top = p[order[: cells - 1]]
        expected[: len(top)] += top
        expected[cells - 1] += max(0.0, 1.0 - float(top.sum()))
    return _chi_square(observed, expected)


def uniformity(scores: F64, cells: int = 32) -> float:
    """p-value of equal cells of `scores`."""
    observed = np.histogram(scores, cells, (0.0, 1.0))[0].astype(np.float64)
    return _chi_square(observed, np.full(cells, len(scores) / cells))


def independence(first: F64, second: F64, cells: int = 8) -> float:
    """p-value of equal cells of the pairs (first[i], second[i]) on the unit square: a dependence, or a bias of either,
    moves pairs between cells. Serial: scores at positions t and t + 1; cross: of choices c and c + 1, or two seeds."""
    if first.shape != second.shape:
        raise ValueError(f"pairs of {first.shape} and {second.shape}")
    observed = np.histogram2d(first, second, cells, ((0.0, 1.0), (0.0, 1.0)))[0].reshape(-1)
    return _chi_square(observed, np.full(cells * cells, len(first) / (cells * cells)))


def _chi_square(observed: F64, expected: F64) -> float:
    """Survival probability, cells from the last on pooled until each expects MIN_EXPECTED. Raises ValueError if fewer
    than two are left: too few draws."""
    seen, awaited = list(observed), list(expected)
    at = len(seen) - 1
    while at > 0:
        if awaited[at] < MIN_EXPECTED:
            awaited[at - 1] += awaited.pop(at)
            seen[at - 1] += seen.pop(at)
        at -= 1
    if len(seen) < 2 or awaited[0] < MIN_EXPECTED:
        raise ValueError(f"{observed.sum():g} draws fill fewer than two cells of {MIN_EXPECTED:g}")
    statistic = sum((o - e) ** 2 / e for o, e in zip(seen, awaited, strict=True))
    return float(stats.chi2.sf(statistic, len(seen) - 1))
