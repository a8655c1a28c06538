"""What compute-sanitizer looks at: a host-driven engine of a small random model, and which kernels its steps ran.

    python -m hil_rigs.gpu.sanitize_serve --part NAME --tool TOOL [--models DIR]

`hil_rigs.gpu.sanitize` runs it, under each tool and once without any, which fills CuPy's cache of compiled kernels. One
part is one engine; the part `direct` launches what no engine's steps hold (`sanitize_kernels`). Together they run every
kernel that the product launches: `SERVES` and a test say which. Lines for the reader: `AT` how far it is, `SERVED` what
was served, `KERNELS` what ran with a plan in it, as file:kernel. Exit 0: all requests ended as asked.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blink_core.abi.config import EngineConfig
from blink_core.abi.params import SamplingParams

if TYPE_CHECKING:
    from blink_core.runtime.cuda_model import CudaNetwork

AT, SERVED, RAN = "AT", "SERVED", "KERNELS"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LIBRARY = "cublasLt"  # its kernels are not ours, but what they are given is
HELD_S = 180.0  # for all requests of a part
NO_FILE = {"step_view": "step_view.cu"} | dict.fromkeys(("step_end", "capture_rows", "capture_end"), "step_end.cu")
NO_FILE |= dict.fromkeys(
    ("kv_tags_begin", "kv_tags_append", "kv_tags_check", "kv_tags_report", "kv_tags_end"), "kv_sanitizer.cu"
)


@dataclass(frozen=True, slots=True)
class Part:
    """An engine. experts: the second of its two layers is a mixture. watched: with capture and the KV sanitizer."""

    dtype: str
    experts: bool
    invariant: bool = False
    watched: bool = False


PARTS = {
    "dense": Part("bfloat16", experts=False),
    "mixture": Part("bfloat16", experts=True),
    "invariant": Part("bfloat16", experts=True, invariant=True),
    "strict": Part("float32", experts=True, watched=True),
}
DIRECT = "direct"  # no engine
EVERY = (*PARTS, DIRECT)
MODELS = "models"  # in place of the parts, with --models
# What the engines' steps hold, by file; the rest is for `direct`. A kernel in neither is one that nobody looks at.
SERVES = {
    "attention_decode.cu": "attention_decode attention_rope", "attention_plan.cu": "attention_plan attention_plan_made",
    "attention_prefill.cu": "attention_prefill", "attention_strict.cu": "attention_strict",
    "elementwise.cu": "embedding rms_norm silu_multiply", "rope_kv.cu": "rope_append",
    "gemm_fixed.cu": "grouped_fixed grouped_fixed_silu", "gemm_skinny.cu": "grouped_skinny_8 grouped_skinny_silu_8",
    "gemm_tile.cu": "tile grouped_tile grouped_tile_silu",
    "kv_sanitizer.cu": "kv_tags_begin kv_tags_append kv_tags_check kv_tags_report kv_tags_end",
    "moe.cu": "moe_route moe_sort moe_route_sort moe_combine", "moe_one.cu": "moe_gate_up_one moe_down_one",
    "sampler.cu": "sample_rows", "step_end.cu": "step_end capture_rows capture_end", "step_view.cu": "step_view",
}  # fmt: skip
SHORT = (3, 20)  # tokens of the greedy prompts; one more, of the last length, samples with all parameters
# Of a prompt that outlives the others, so that one row is decoded alone. 290: its attention goes in splits. racecheck
# follows every access to shared memory, so its prompt is shorter.
LONG = {"memcheck": 290, "racecheck": 100, "initcheck": 290, "synccheck": 290}
TOKENS, LONG_TOKENS = 6, 7  # the others outlive the long prompt's chunks, so that several rows are decoded too
LONGEST = 512  # tokens of a request
BUDGET = 96  # above 64 a mixture takes other kernels, and so does a batch-invariant product


class Steps:
    """Which kernels ran. A step is launched as a graph, so what each bucket's holds is noted while it is captured."""

    def __init__(self, tool: str) -> None:
        self._tool = tool
        self.ran: set[str] = set()
        self._held: dict[Any, set[str]] = {}
        self._current: set[str] = set()

    def patch(self) -> None:
        """Puts itself where kernels are got, launched and captured, and graphs launched."""
        from blink_core.ops.cublaslt import CublasLt
        from blink_core.ops.cuda_modules import Kernel, Kernels
        from blink_core.runtime.cuda_graphs import StepGraphs
        from blink_core.runtime.cuda_step import CudaStep

        files = dict(NO_FILE)

        def before(owner: type, name: str, note: Callable[..., None]) -> None:
            shipped = getattr(owner, name)

            def noted(itself: Any, *arguments: Any, **named: Any) -> Any:
                note(itself, *arguments)
                return shipped(itself, *arguments, **named)

            setattr(owner, name, noted)

        def begin(step: Any, bucket: Any, *_: Any) -> None:
            self._current = self._held.setdefault(bucket, set())

        before(Kernels, "get", lambda kernels, file, name, *_: files.update({name: file}))
        before(Kernel, "launch", lambda kernel, *_: self._current.add(f"{files.get(kernel.name, '?')}:{kernel.name}"))
        before(CublasLt, "launch", self._product)
        before(CudaStep, "run", begin)
        before(StepGraphs, "launch", lambda graphs, graph: self.launched(graph.bucket))

    def _product(self, _: Any, x: Any, weight: Any, out: Any, residual: Any, *__: Any) -> None:
        """A product by cuBLASLt. Its kernels store by TMA, which initcheck does not see: under it what they write is
        written before them once more. Under no other tool, for that would be a step that no engine runs."""
        import cupy as cp

        self._current.add(f"{LIBRARY}:{LIBRARY}")
        if self._tool == "initcheck" and residual is None:
            cp.cuda.runtime.memsetAsync(out.data.ptr, 0, out.nbytes, cp.cuda.get_current_stream().ptr)

    def launched(self, bucket: Any) -> None:
        """A step of a bucket begins."""
        new = self._held.get(bucket, set()) - self.ran
        self.ran |= new
        say(AT, f"step of {bucket.name}, {len(new)} more kernels, {len(self.ran)} so far")

    def direct(self) -> None:
        """From here on what is launched runs, in no step."""
        self._current = self.ran


_BEGUN = time.monotonic()


def say(word: str, text: str) -> None:
    """One line for `hil_rigs.gpu.sanitize`."""
    print(f"{word} {text}" + (f" ({time.monotonic() - _BEGUN:.1f} s)" if word != RAN else ""), flush=True)


class HostRandom:
    """As cupy.random.RandomState, drawn on the host: cuRAND's kernels are not what is looked at, and start slowly."""

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._rng = np.random.default_rng(seed)

    def randint(self, low: int, high: int, count: int, dtype: Any) -> Any:
        import cupy as cp

        return cp.asarray(self._rng.integers(low, high, count, dtype))


def widened(value: Any) -> Any:
    """A bfloat16 network, or part of one, with float32 arrays of the same values."""
    import cupy as cp
    import numpy as np

    if isinstance(value, cp.ndarray) and value.dtype == np.uint16:
        return cp.asarray((cp.asnumpy(value).astype(np.uint32) << 16).view(np.float32))
    if isinstance(value, tuple):
        return tuple(widened(v) for v in value)
    if is_dataclass(value) and type(value).__name__.startswith("Cuda"):
        kept: Any = value
        return replace(kept, **{f.name: widened(getattr(value, f.name)) for f in fields(value) if f.name != "ops"})
    return value


def network_of(part: Part, longest: int) -> CudaNetwork:
    """The part's model, small and random."""
    import cupy as cp

    from blink_core.models.config import ExpertConfig
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import random_network
    from hil_rigs.gpu.bench import LLAMA_3_8B, QWEN3_30B_A3B

    cp.random.RandomState = HostRandom
    shape = replace(
        QWEN3_30B_A3B if part.experts else LLAMA_3_8B,
        hidden_size=256, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=512,
        max_position_embeddings=longest, experts=ExpertConfig(8, 2, 256, True, (1,)) if part.experts else None,
    )  # fmt: skip
    network = random_network(shape, CudaOps("bfloat16", batch_invariant=part.invariant), longest)
    if part.dtype == "bfloat16":
        return network
    wide: CudaNetwork = widened(network)
    return replace(wide, ops=CudaOps(part.dtype, batch_invariant=part.invariant))


def workload(tool: str, vocab: int, positions: int) -> tuple[EngineConfig, list[tuple[Any, SamplingParams]]]:
    """The engine's sizes, and the requests: every kind of step comes, up to one row decoded alone."""
    import numpy as np

    longest = min(LONGEST, positions)
    config = EngineConfig(
        vocab=vocab, slots=8, sq_entries=32, cq_entries=256, max_rows=4, token_budget=BUDGET, pages=66,
        max_len=longest, arena_tokens=1024, lease_us=600_000_000,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, vocab, n) for n in (*SHORT, min(LONG[tool], longest - LONG_TOKENS - 1))]
    greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    sampled = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3, logprobs=4,
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias=((5, 1.0),),
    )  # fmt: skip
    last = SamplingParams(max_tokens=LONG_TOKENS, ignore_eos=True)
    return config, [*((p, greedy) for p in prompts[:-1]), (prompts[-2], sampled), (prompts[-1], last)]


def serve(name: str, network: CudaNetwork, tool: str, *, watched: bool) -> None:
    """Serves every kind of step. Raises RuntimeError if a request ends otherwise than by its length."""
    from blink_core.runtime.launch import LaunchOptions
    from hil_rigs.gpu.session import ask, client_of, running

    config, requests = workload(tool, network.config.vocab_size, network.config.max_position_embeddings)
    with tempfile.TemporaryDirectory() as folder:
        options = LaunchOptions(
            strategy="host", step_limit_s=HELD_S, tune=False, mirror=False,
            capture=Path(folder) / "capture.bin" if watched else None,
            kv_sanitizer=Path(folder) / "kv.jsonl" if watched else None,
        )  # fmt: skip
        say(AT, f"{name}: building the engine")
        with running(config, network, options) as runtime:
            say(AT, f"{name}: built, serving {len(requests)} requests")
            answers = ask(client_of(runtime), requests, HELD_S)
    if any(answer.ended != "LENGTH" for answer in answers):
        raise RuntimeError(f"{name}: requests ended {[answer.ended for answer in answers]}")
    say(SERVED, f"{name}: {sum(len(a.tokens) for a in answers)} tokens of {len(answers)} requests")


def launch_direct(steps: Steps) -> None:
    """Launches what no serve does. Raises RuntimeError if a kernel made something else than it should."""
    from blink_core.ops.cuda_ops import CudaOps
    from hil_rigs.gpu.sanitize_kernels import LIMIT, all_launched

    steps.direct()
    count = 0
    for launched in all_launched(CudaOps("bfloat16"), CudaOps("bfloat16", batch_invariant=True)):
        if not launched.error <= LIMIT:
            raise RuntimeError(f"{launched.case}: error {launched.error:.3g}, at most {LIMIT}")
        count += 1
        say(AT, launched.case)
    say(SERVED, f"{DIRECT}: {count} launches of {len(steps.ran)} kernels")


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=(*EVERY, MODELS), required=True)
    parser.add_argument("--tool", choices=TOOLS, required=True, help="whose workload")
    parser.add_argument("--models", type=Path, help="folder of model folders, for the part 'models'")
    options = parser.parse_args(arguments)
    if (options.part == MODELS) != (options.models is not None):
        parser.error(f"--part {MODELS} and --models go together")
    # Each kernel that is loaded is patched, cuBLASLt's thousands among them; nothing resident forbids to wait here.
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    import cupy as cp

    cp.cuda.set_allocator(None)  # one allocation an array: within a pool a write beyond an end is nobody's fault
    steps = Steps(options.tool)
    steps.patch()
    say(AT, "imported")
    if options.part == DIRECT:
        launch_direct(steps)
    elif options.part != MODELS:
        part = PARTS[options.part]
        serve(options.part, network_of(part, LONGEST), options.tool, watched=part.watched)
    else:
        from blink_core.models.load_config import load_config
        from blink_core.ops.cuda_ops import CudaOps
        from blink_core.runtime.cuda_model import load_network

        for path in sorted(p for p in options.models.iterdir() if (p / "config.json").exists()):
            longest = min(LONGEST, load_config(path).max_position_embeddings)
            serve(path.name, load_network(path, CudaOps("float32"), longest), options.tool, watched=False)
    say(RAN, " ".join(sorted(steps.ran)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
