"""One token of a mixture by its own kernels, as a step runs them: layers one behind the other on the same memory,
eagerly and in a graph that is replayed, on more and fewer multiprocessors, with the router joined to the first product
and apart.

The kernels tell each other the router's logits through memory that no launch resets, so what a launch before left there
must never be taken for this one's: the layers have other routers, and a run begins from one of several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import cupy as cp
import numpy as np

from blink_core.ops.cuda_capture import captured
from blink_core.ops.cuda_moe import CudaMoe
from blink_core.ops.cuda_ops import CudaOps, CudaWeight, Norm, to_device, to_host
from blink_core.ops.numpy_ops import NumpyOps
from hil_rigs.gpu.attention_cases import dawdle
from hil_rigs.gpu.comparison import F32, LIMITS, Outcome, drawn, error_of, poisoned

ONE_CASES = (  # experts, of a token, hidden, inner
    (512, 8, 256, 64), (5, 2, 4096, 96), (129, 16, 2080, 32), (128, 8, 2048, 40), (16, 8, 2048, 768),
)  # fmt: skip
TOKENS, LAYERS, ROUNDS, REPLAYS = 3, 2, 3, 6
RESERVED = (1, 7, 0)  # multiprocessors left alone, in turn, on the same memory


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, here and on the device."""

    norm: cp.ndarray
    router: CudaWeight
    gate_up: CudaWeight
    down: CudaWeight
    norm_host: F32
    router_host: F32
    gate_up_host: F32
    down_host: F32


def drawn_layers(ops: CudaOps, rng: np.random.Generator, experts: int, hidden: int, inner: int) -> list[Layer]:
    """LAYERS of them, which differ in norm and router."""
    gate_up, gate_up_host = drawn(rng, ops.dtype, experts, 2 * inner, hidden, scale=hidden**-0.5)
    down, down_host = drawn(rng, ops.dtype, experts, hidden, inner, scale=inner**-0.5)
    layers = []
    for _ in range(LAYERS):
        rows = (rng.standard_normal((experts, hidden)) * 2 * hidden**-0.5).astype(np.float32)
        rows[1 : experts // 4 * 2 : 2] = rows[: experts // 4 * 2 : 2]  # equals side by side
        rows[-(experts // 4) :] = rows[: experts // 4]  # and far apart: the lower index wins
        router = to_device(rows, ops.dtype)
        norm, norm_host = drawn(rng, ops.dtype, hidden)
        weights = (CudaWeight(router), CudaWeight(gate_up), CudaWeight(down))
        layers.append(Layer(norm, *weights, norm_host, to_host(router, ops.dtype), gate_up_host, down_host))
    return layers


class Mixture:
    """The layers' mixtures on one residual stream ``x``."""

    def __init__(self, ops: CudaOps, layers: list[Layer], top_k: int, joined: bool) -> None:
        self.ops, self.layers, self.top_k = ops, layers, top_k
        experts, hidden, inner = layers[0].down.nk.shape
        self.moe = CudaMoe(ops.kernels, ops.gemm, experts, top_k, hidden, inner, 1, ops.storage)
        self.moe.join_router = joined
        self.sizes = cp.asarray(np.array([1, 1, 0, 0], np.int32))
        self.x, self.h = poisoned(ops, 1, hidden), poisoned(ops, 1, hidden)

    def layer(self, number: int) -> None:
        """One layer, as a step launches it."""
        layer = self.layers[number]
        self.moe(
            self.x, layer.router, layer.gate_up, layer.down, self.sizes, self.x, normalize=True, residual=self.x,
            norm=Norm(layer.norm, 1e-6), normed=self.h,
        )  # fmt: skip

    def run(self) -> None:
        """All layers, ROUNDS times over."""
        for _ in range(ROUNDS):
            for number in range(LAYERS):
                self.layer(number)

    def result(self, token: cp.ndarray, work: Callable[[], None]) -> F32:
        """The stream after ``work`` on ``token``. On the current stream."""
        self.x[...] = token
        work()
        cp.cuda.get_current_stream().synchronize()
        return to_host(self.x, self.ops.dtype)

    def expected(self, number: int, before: F32) -> tuple[F32, F32, F32]:
        """The normed input and the stream after a layer with the choice that it made, and its ideal logits."""
        numpy, layer = NumpyOps(), self.layers[number]
        normed = numpy.rms_norm(before, layer.norm_host, 1e-6)
        h = to_host(self.h, self.ops.dtype)  # its rounding edges are not the reference's
        after = before.astype(np.float32)
        index, weight = cp.asnumpy(self.moe.index[0]), cp.asnumpy(self.moe.weight[0])
        for j in np.argsort(index):
            act = numpy.silu_mul(h @ layer.gate_up_host[index[j]].T)
            after = after + act @ layer.down_host[index[j]].T * weight[j]
        return normed, after, h @ layer.router_host.T


def _layers(mixture: Mixture, token: cp.ndarray, case: str) -> Iterator[Outcome]:
    """Each layer alone, beside its twin."""
    dtype, numpy = mixture.ops.dtype, NumpyOps()
    mixture.x[...] = token
    for number in range(LAYERS):
        before = to_host(mixture.x, dtype)
        mixture.h[...] = poisoned(mixture.ops, *mixture.h.shape)
        mixture.layer(number)
        after, logits = to_host(mixture.x, dtype), cp.asnumpy(mixture.moe.logits)
        normed, expected, ideal = mixture.expected(number, before)
        yield Outcome("one: norm", case, dtype, error_of(to_host(mixture.h, dtype), normed), LIMITS[dtype])
        yield Outcome("one: logits", case, dtype, error_of(logits, ideal), LIMITS["float32"] * 4)
        index, weight = numpy.route(logits, mixture.top_k, normalize=True)
        same = np.array_equal(cp.asnumpy(mixture.moe.index), index)
        yield Outcome("one: experts", case, dtype, 0.0 if same else 1.0, 0.0)
        yield Outcome("one: weights", case, dtype, error_of(cp.asnumpy(mixture.moe.weight), weight), 1e-6)
        yield Outcome("one", case, dtype, error_of(after, expected), LIMITS[dtype] * 2)


def _not_a_number(mixture: Mixture, token: cp.ndarray, case: str) -> Iterator[Outcome]:
    """A NaN in the token makes its result NaN, and chooses experts that are there, each once."""
    bad = token.copy()
    bad[0, -1] = poisoned(mixture.ops, 1)[0]
    result = mixture.result(bad, lambda: mixture.layer(0))
    index, weight = cp.asnumpy(mixture.moe.index[0]), cp.asnumpy(mixture.moe.weight[0])
    there = len(set(index.tolist())) == mixture.top_k and index.min() >= 0 and index.max() < mixture.moe.logits.shape[1]
    passed_on = bool(np.isnan(result).all() and np.isnan(weight).all())
    yield Outcome("one: of NaN, experts", case, mixture.ops.dtype, 0.0 if there else 1.0, 0.0)
    yield Outcome("one: of NaN, result", case, mixture.ops.dtype, 0.0 if passed_on else 1.0, 0.0)


def one_token(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """See the module. A result has the same bits however it is launched."""
    if ops.dtype == "float32" or ops.batch_invariant:
        return
    for experts, top_k, hidden, inner in ONE_CASES:
        layers = drawn_layers(ops, rng, experts, hidden, inner)
        tokens = [drawn(rng, ops.dtype, 1, hidden, scale=0.5)[0] for _ in range(TOKENS)]
        for joined in (True, False):
            case = f"{top_k} of {experts}, {hidden} to {inner}, router {'joined' if joined else 'apart'}"
            mixture = Mixture(ops, layers, top_k, joined)
            yield from _layers(mixture, tokens[0], case)

            def same(op: str, results: list[bool], case: str = case) -> Outcome:
                return Outcome(f"one: same bits {op}", case, ops.dtype, float(results.count(False)), 0.0)

            stream = cp.cuda.Stream(non_blocking=True)
            cp.cuda.Device().synchronize()  # what the default stream prepared
            with stream:
                eager = [mixture.result(token, mixture.run) for token in tokens]
                again = [np.array_equal(mixture.result(t, mixture.run), e) for t, e in zip(tokens, eager, strict=True)]
                yield same("again", again)
                graph = captured(stream, mixture.run)
                replayed = []
                for i in range(REPLAYS):
                    result = mixture.result(tokens[i % TOKENS], partial(graph.launch, stream))
                    replayed.append(np.array_equal(result, eager[i % TOKENS]))
                yield same("replayed", replayed)
                less = []
                for number, reserved in enumerate(RESERVED):
                    ops.kernels.reserved = reserved
                    less.append(np.array_equal(mixture.result(tokens[number], mixture.run), eager[number]))
                yield same("on fewer multiprocessors", less)
                yield from _not_a_number(mixture, tokens[1], case)
                yield same("after NaN", [np.array_equal(mixture.result(tokens[2], mixture.run), eager[2])])
                yield same("behind its input", [_behind(mixture, tokens[0])])


def _behind(mixture: Mixture, token: cp.ndarray) -> bool:
    """Whether a layer right behind the kernel that writes its token, which still waits while the layer may start, makes
    what it makes with the token long there."""
    ops = mixture.ops
    weight = to_device(np.ones(token.shape[1], np.float32), ops.dtype)
    ops.rms_norm(token, weight, 1e-6, mixture.x)
    written = mixture.x.copy()
    expected = mixture.result(written, lambda: mixture.layer(1))
    mixture.result(token, lambda: mixture.layer(0))
    held = dawdle(ops)
    ops.rms_norm(token, weight, 1e-6, mixture.x)
    mixture.layer(1)
    cp.cuda.get_current_stream().synchronize()
    del held
    return bool(np.array_equal(to_host(mixture.x, ops.dtype), expected))
