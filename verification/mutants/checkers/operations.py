"""Layer operations of the product by themselves, against the formula in float64 and against themselves.

Attention over scattered pages (A, G, K, M), the table of rotary angles (O), routing (M), and the bits of products and
attention rows in strict mode, whatever stands beside them (N).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verification.mutants.checkers.base import Checker, Finding, Product, found
from verification.mutants.engines import parts_of
from verification.mutants.parts import Part, Parts

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
LIMIT = 1e-5  # of the norm of an error, in relation to the norm of the reference: float32 gives about 3e-7


@dataclass(frozen=True)
class OperationChecker:
    """Runs one drawn check."""

    name: str
    functions: frozenset[str]
    clauses: Mapping[str, frozenset[str]]
    check: Callable[[Parts, np.random.Generator], tuple[str, str] | None]
    where: frozenset[str] = frozenset({"python"})
    seconds: float = 30.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """What `check` found wrong."""
        wrong = self.check(parts_of(product, deadline), np.random.default_rng([seed, 13]))
        return None if wrong is None else found(self, *wrong)


@dataclass(slots=True)
class Step:
    """A drawn step over a pool whose other slots are poison. table: [rows, pages], unused columns are out of range."""

    starts: NDArray[np.int32]
    contexts: NDArray[np.int32]
    table: NDArray[np.int32]
    page_size: int
    q: F32
    k: F32
    v: F32
    keys: list[F32] = field(default_factory=list)
    values: list[F32] = field(default_factory=list)


def draw_step(rng: np.random.Generator, heads: int, kv_heads: int, rows: list[tuple[int, int]], size: int) -> Step:
    """rows: (new tokens, context) of each."""
    dim = 8
    pages = sum(-(-context // size) for _, context in rows) + 4
    free = rng.permutation(np.arange(pages)).tolist()
    pool = [np.full((pages, size, kv_heads, dim), np.nan, np.float32) for _ in range(2)]
    step = Step(
        starts=np.cumsum([0, *(new for new, _ in rows)]).astype(np.int32),
        contexts=np.array([context for _, context in rows], np.int32),
        table=np.full((len(rows), max(-(-context // size) for _, context in rows) + 1), -1, np.int32),
        page_size=size,
        q=rng.standard_normal((sum(new for new, _ in rows), heads, dim), dtype=np.float32),
        k=pool[0],
        v=pool[1],
    )
    for row, (_, context) in enumerate(rows):
        mine = [free.pop() for _ in range(-(-context // size))]
        step.table[row, : len(mine)] = mine
        slots = (np.array(mine)[:, None] * size + np.arange(size)).ravel()[:context]
        for pages_, kept in ((step.k, step.keys), (step.v, step.values)):
            kept.append(2 * rng.standard_normal((context, kv_heads, dim), dtype=np.float32))
            pages_.reshape(-1, kv_heads, dim)[slots] = kept[-1]
    return step


def exact_attention(step: Step, window: int | None) -> F64:
    """Softmax attention of every query by itself, float64 [tokens, heads * dim]."""
    out = np.zeros((len(step.q), *step.q.shape[1:]))
    for row, context in enumerate(step.contexts.tolist()):
        first, stop = step.starts[row], step.starts[row + 1]
        for token in range(first, stop):
            end = context - (stop - token) + 1
            begin = 0 if window is None else max(0, end - window)
            for head in range(step.q.shape[1]):
                group = head // (step.q.shape[1] // step.k.shape[2])
                keys, values = (a[row][begin:end, group].astype(np.float64) for a in (step.keys, step.values))
                scores = keys @ step.q[token, head].astype(np.float64) / np.sqrt(step.q.shape[2])
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ values / weights.sum()
    return out.reshape(len(step.q), -1)


def attend(ops: Part, step: Step, window: int | None) -> F32:
    """The product's."""
    plan = ops.keep("plan_attention", step.starts, step.contexts, step.table, step.page_size, window)
    result: F32 = ops.call("paged_attention", step.q, step.k, step.v, plan)
    return result


ATTENTION = {
    "attention without a window": frozenset("AGKSM"),
    "attention in a window": frozenset("A"),
}


def check_attention(parts: Parts, rng: np.random.Generator) -> tuple[str, str] | None:
    """Decode and prefill rows together, every ratio of heads, both modes; then the same in windows."""
    drawn = []
    for heads, kv_heads in ((4, 4), (6, 2), (10, 2), (7, 1)):
        for strict in (False, True):
            # Decode rows of different lengths on as many pages, and of more pages than another but not too many.
            contexts = [9, 16, 17, 31, 33, *rng.choice(np.array([1, 3, 7, 8]), 3).tolist()]
            rows = [(1, int(c)) for c in contexts]
            rows += [(int(n), int(n) + int(before)) for n, before in ((2, 0), (5, 11), (9, rng.integers(1, 30)))]
            if strict and heads == 6:
                rows.append((270, 290))  # beyond two blocks of 128
            step = draw_step(rng, heads, kv_heads, [rows[i] for i in rng.permutation(len(rows))], 8)
            drawn.append((strict, step, int(rng.integers(2, 12))))
    modes = {strict: parts.keep("blink_core.ops.numpy_ops:NumpyOps", strict) for strict in (False, True)}
    for clause in ATTENTION:
        for strict, step, drawn_window in drawn:
            window = drawn_window if "in a window" in clause else None
            got, expected = attend(modes[strict], step, window), exact_attention(step, window)
            error = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
            worst = int(np.argmax(np.nan_to_num(error, nan=np.inf)))
            if not error[worst] <= LIMIT:
                what = f"{step.q.shape[1]}/{step.k.shape[2]} heads, window {window}, strict {strict}, token {worst}"
                return clause, f"{what} of rows {step.contexts.tolist()}: error {error[worst]:.3g}"
    return None


ROTARY = {"angles": frozenset("O")}


def check_rotary_table(parts: Parts, rng: np.random.Generator) -> tuple[str, str] | None:
    """Cosines and sines at positions far and near, asked for in any order, against float64."""
    frequencies = (1.0 / 10000 ** (np.arange(0, 16, 2) / 16)).astype(np.float32)
    scale = float(rng.uniform(0.9, 1.3))
    table = parts.keep("blink_core.ops.rope:RotaryTable", frequencies, scale)
    for most in (40, 1500, 5000):
        positions = np.concatenate([rng.integers(0, most, 40), [most - 1, 0]]).astype(np.int32)
        for got, function in zip(table.call("__call__", positions), (np.cos, np.sin), strict=True):
            angle = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)
            wrong = np.abs(got[:, 0] - scale * function(angle)).max(axis=1)
            if not wrong.max() <= 1e-6:
                at = int(positions[int(wrong.argmax())])
                return "angles", f"position {at}: off by {wrong.max():.3g} among positions up to {most}"
    return None


ROUTING = {"experts": frozenset("M")}


def check_routing(parts: Parts, rng: np.random.Generator) -> tuple[str, str] | None:
    """Experts and their weights against a sort in float64; some rows are negative throughout, some have equals."""
    ops = parts.keep("blink_core.ops.numpy_ops:NumpyOps")
    logits = rng.standard_normal((40, 9)).astype(np.float32) * 2
    logits[10:20] -= 12
    logits[20:24, 2:6] = logits[20:24, 1:2]
    for normalize in (False, True):
        index, weight = ops.call("route", logits, 3, normalize=normalize)
        for row, values in enumerate(logits.astype(np.float64)):
            order = sorted(range(9), key=lambda e: (-values[e], e))[:3]
            p = np.exp(values - values.max())
            p = p[order] / (p[order].sum() if normalize else p.sum())
            if index[row].tolist() != order or not np.allclose(weight[row], p, rtol=1e-5, atol=1e-7):
                shown = [*zip(index[row].tolist(), weight[row].tolist(), strict=True)]
                expected = [*zip(order, p.tolist(), strict=True)]
                return "experts", f"row {row}, normalize {normalize}: {shown}, expected {expected}"
    return None


BITS = {"bits of a row": frozenset("N")}


def check_bits(parts: Parts, rng: np.random.Generator) -> tuple[str, str] | None:
    """In strict mode: a row of a product in any batch, and a token's attention by decode and in any chunk."""
    ops = parts.keep("blink_core.ops.numpy_ops:NumpyOps", True)
    x = rng.standard_normal((23, 96), dtype=np.float32)
    for n in (96, 512):
        weight = ops.keep("prepare_linear", rng.standard_normal((96, n), dtype=np.float32))
        whole = ops.call("linear", x, weight)
        for first, stop in ((0, 1), (1, 3), (3, 9), (9, 22), (22, 23), (4, 5)):
            part = ops.call("linear", x[first:stop], weight)
            if part.tobytes() != whole[first:stop].tobytes():
                return "bits of a row", f"rows {first} to {stop} of a product with 96 x {n} differ from the whole"
    length = int(rng.integers(140, 200))
    for window in (None, 24):
        step = draw_step(rng, 6, 2, [(length, length)], 16)
        whole = attend(ops, step, window)
        for first, stop in ((0, 3), (70, 74), (130, 131), (length - 9, length - 7), (length - 1, length)):
            cut = Step(
                np.array([0, stop - first], np.int32),
                np.array([stop], np.int32),
                step.table,
                16,
                step.q[first:stop],
                step.k,
                step.v,
            )
            part = attend(ops, cut, window)
            if part.tobytes() != whole[first:stop].tobytes():
                where = f"positions {first} to {stop} of {length}, window {window}"
                return "bits of a row", f"attention of {where} differs between one chunk and its own"
    return None


_HERE = "verification.mutants.checkers.operations."


def _checker(
    name: str,
    check: Callable[[Parts, np.random.Generator], tuple[str, str] | None],
    clauses: Mapping[str, frozenset[str]],
    *functions: str,
) -> Checker:
    return OperationChecker(name, frozenset(_HERE + f for f in (check.__name__, *functions)), clauses, check)


CHECKERS: tuple[Checker, ...] = (
    _checker("attention-float64", check_attention, ATTENTION, "exact_attention"),
    _checker("rotary-table-float64", check_rotary_table, ROTARY),
    _checker("routing-float64", check_routing, ROUTING),
    _checker("strict-bits", check_bits, BITS),
)
