"""HuggingFace as the oracle: transformers' own loaders, modelling code and tokeniser, on the original file.

Nothing here comes from the engine (design section 9). The model is loaded with ``dtype=`` and never cast afterwards,
with eager attention, dequantised at load, offline, on the CPU unless told otherwise. ``float32`` is HuggingFace as
people run it and gives the yardstick; ``float64`` is the reference, run with its float32 islands lifted
(``verification.oracles.float64``).

LongRoPE models compute all positions of a call with frequencies chosen by its longest position, and ``generate``
starts anew when a sequence outgrows the original maximum. So "the logits after n tokens" are those of a call of n
tokens, and a run here is put together accordingly: rows up to the original maximum from a call that ends there, later
ones from the whole; K and V are those of the whole.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from verification.oracles.float64 import Float64Islands, rebuild_rotary
from verification.oracles.gguf_decode import read_header
from verification.oracles.pre_tokenizer import mend_pre_tokenizer

DType = Literal["float32", "float64", "bfloat16"]
Array = NDArray[np.float32] | NDArray[np.float64]
_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,  # a yardstick of kernels, never a reference
}


TAILS = (1, 2, 3, 5, 9)  # tokens of a second call: matrix kernels of the CPU differ for so few


class OracleError(RuntimeError):
    """The oracle cannot load the model, or was asked for something outside its limits."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One teacher-forced run: logits [positions - start, vocab] and k, v [layers, positions, kv_heads, head_dim]."""

    ids: tuple[int, ...]
    start: int
    logits: Array
    k: Array
    v: Array

    @property
    def nbytes(self) -> int:
        return int(self.logits.nbytes + self.k.nbytes + self.v.nbytes)


def configure_torch(threads: int, device: str = "cpu") -> None:
    """Fix the thread count and ask for deterministic kernels: reduction order depends on both. Process-wide.

    On a GPU a few operations have no deterministic kernel; then PyTorch only warns. TF32 stays off.
    """
    if threads < 1:
        raise OracleError(f"{threads} threads; at least one is needed")
    torch.set_num_threads(threads)
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
    torch.use_deterministic_algorithms(True, warn_only=device != "cpu")
    torch.set_float32_matmul_precision("highest")


class HFOracle:
    """A model in one dtype with its tokeniser. Build it with ``HFOracle.load`` or ``load_pair``."""

    def __init__(
        self,
        path: Path,
        model: Any,
        tokenizer: Any,
        dtype: DType,
        *,
        threads: int,
        cache_bytes: int,
        load_s: float,
        device: str = "cpu",
    ) -> None:
        self.path = path
        self.device = device
        self.dtype = dtype
        self.load_s = load_s
        self.threads = threads
        self._model = model
        self._tokenizer = tokenizer
        self._cache: OrderedDict[tuple[int, ...], Forward] = OrderedDict()
        self._cache_bytes = cache_bytes

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: DType,
        threads: int = 1,
        cache_bytes: int = 1 << 30,
        attention: str = "eager",
        device: str = "cpu",
    ) -> HFOracle:
        """Load a GGUF file, or a directory with ``config.json`` and safetensors.

        device: of torch; a model that is too large for the CPU runs on "cuda", in another process than the engine.

        attention: HuggingFace attention back end (``sdpa`` is another correct float32 implementation, for tests of the
        criterion). cache_bytes: limit of the cache of forward runs. Raises ``OracleError`` with the path and cause.
        """
        return cls._load(Path(path), _Source(Path(path)), dtype, threads, cache_bytes, attention, device)

    @classmethod
    def load_pair(
        cls, path: str | Path, *, threads: int = 1, cache_bytes: int = 1 << 30, device: str = "cpu"
    ) -> tuple[HFOracle, HFOracle]:
        """The float64 and the float32 oracle of one model; its configuration and tokeniser are read once."""
        source = _Source(Path(path))
        first, second = (
            cls._load(Path(path), source, dtype, threads, cache_bytes, "eager", device)
            for dtype in ("float64", "float32")
        )
        return first, second

    @classmethod
    def _load(
        cls,
        path: Path,
        source: _Source,
        dtype: str,
        threads: int,
        cache_bytes: int,
        attention: str,
        device: str,
    ) -> HFOracle:
        if dtype not in _DTYPES:
            raise OracleError(f"dtype {dtype!r}: the oracle runs in {' or '.join(_DTYPES)}")
        configure_torch(threads, device)
        started = time.monotonic()
        model = source.model(_DTYPES[dtype], attention)
        wrong = {str(p.dtype) for p in model.parameters() if p.dtype is not _DTYPES[dtype]}
        if wrong:
            raise OracleError(f"{path}: asked for {dtype}, transformers loaded parameters in {sorted(wrong)}")
        if dtype == "float64" and rebuild_rotary(model) == 0:
            raise OracleError(f"{path}: found no rotary embedding to build in float64 in {type(model).__name__}")
        model.to(device)  # where it lies, never what it is made of
        load_s = time.monotonic() - started
        kind = cast(DType, dtype)
        return cls(
            path,
            model,
            source.tokenizer(),
            kind,
            threads=threads,
            cache_bytes=cache_bytes,
            load_s=load_s,
            device=device,
        )

    # -- the model -----------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """transformers' configuration object."""
        return self._model.config

    @property
    def model(self) -> Any:
        """The transformers model itself, for tests that perturb it. Do not cast or change it."""
        return self._model

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    def parameters(self) -> dict[str, NDArray[np.floating[Any]]]:
        """Parameters by HuggingFace name, as NumPy arrays in the oracle's dtype (views; do not write)."""
        return {name: value.detach().numpy() for name, value in self._model.named_parameters()}

    def teacher_force(self, ids: Sequence[int], *, start: int = 0) -> Array:
        """Logits [len(ids) - start, vocab] in the oracle's dtype (bfloat16 as float32): row i predicts the token after
        ``ids[start + i]``."""
        return self.forward(ids, start=start).logits

    def kv(self, ids: Sequence[int]) -> tuple[Array, Array]:
        """(K, V) from ``past_key_values``, each [layers, len(ids), kv_heads, head_dim]; K is after the rotary step."""
        run = self.forward(ids, start=max(len(ids) - 1, 0))
        return run.k, run.v

    def forward(self, ids: Sequence[int], *, start: int = 0) -> Forward:
        """Logits from position ``start`` on, and K/V of all positions, in one run of the model.

        A cached run of which ``ids`` is a prefix serves without computing: attention is causal, so its rows are those
        of ``ids`` up to rounding.
        """
        return self.forward_many([ids], start=[start])[0]

    def forward_many(
        self, batch: Sequence[Sequence[int]], *, start: Sequence[int] | None = None, batch_tokens: int = 512
    ) -> list[Forward]:
        """``forward`` of several sequences, run together up to ``batch_tokens`` padded tokens at a time.

        Shorter sequences are padded on the right; under causal attention no real position sees the padding.
        """
        keys = [self._checked(ids) for ids in batch]
        starts = [0] * len(keys) if start is None else list(start)
        if len(starts) != len(keys):
            raise OracleError(f"{len(starts)} starts for {len(keys)} sequences")
        for key, first in zip(keys, starts, strict=True):
            if not 0 <= first < len(key):
                raise OracleError(f"start {first} is outside a sequence of {len(key)} tokens")
        results: dict[int, Forward] = {}
        missing: list[int] = []
        for index in sorted(range(len(keys)), key=lambda i: -len(keys[i])):
            hit = self._cached(keys[index], starts[index])
            if hit is None:
                missing.append(index)
            else:
                results[index] = hit
        while missing:
            width = len(keys[missing[0]])
            taken, missing = missing[: max(1, batch_tokens // width)], missing[max(1, batch_tokens // width) :]
            for index, run in zip(taken, self._run([keys[i] for i in taken], [starts[i] for i in taken]), strict=True):
                results[index] = run
                self._remember(run)
        return [results[index] for index in range(len(keys))]

    def in_other_orders(self, ids: Sequence[int], position: int) -> list[Forward]:
        """The row of one position again, added up in other orders: what float32 loses in it differs from run to run.

        The tokens up to it go through the model in two calls over one cache, TAILS of them in the second, so that other
        kernels multiply. Each result holds that row alone: logits [1, vocab], k and v [layers, 1, heads, head_dim].
        Nothing for models whose cache forgets (sliding windows) or whose frequencies depend on the length (LongRoPE):
        two calls would not be the same function of the tokens.
        """
        key = self._checked(ids)
        if not 0 <= position < len(key):
            raise OracleError(f"position {position} is outside a sequence of {len(key)} tokens")
        kinds = set(getattr(self._model.config, "layer_types", None) or ["full_attention"])
        if (
            self.rope_switch is not None
            or kinds != {"full_attention"}
            or getattr(self._model.config, "sliding_window", None)
        ):
            return []
        cuts = sorted({max(0, position + 1 - tail) for tail in TAILS})
        return [self._in_two(key[: position + 1], cut) for cut in cuts]

    def _in_two(self, key: tuple[int, ...], cut: int) -> Forward:
        tokens = torch.tensor([key], device=self.device)
        with self._running():
            cache = transformers.DynamicCache()
            if cut:
                cache = _cache_of(self._model(input_ids=tokens[:, :cut], past_key_values=cache, use_cache=True))
            out = self._model(input_ids=tokens[:, cut:], past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers = _cache_of(out).layers
        k, v = (_stack([_array(getattr(x, part)[0, :, -1:]) for x in layers]) for part in ("keys", "values"))
        return Forward(key, len(key) - 1, _array(out.logits[0]).copy(), k, v)

    def generate(self, ids: Sequence[int], n: int, *, ignore_eos: bool = False) -> list[int]:
        """Up to ``n`` greedy tokens after ``ids`` by HuggingFace's ``generate``, the end-of-sequence token included.

        ``ignore_eos``: that token is one like all others: it may be chosen, and ends nothing.
        """
        key = self._checked(ids)
        if n < 1:
            raise OracleError(f"n is {n}; at least one token must be generated")
        own = self._model.generation_config
        kept = own.eos_token_id
        if ignore_eos:
            own.eos_token_id = None  # the model's own stands in for what a call's configuration leaves out
        config = transformers.GenerationConfig(
            max_new_tokens=n, do_sample=False, eos_token_id=own.eos_token_id, pad_token_id=0
        )
        prompt = torch.tensor([key], device=self.device)
        try:
            with self._running():
                out = self._model.generate(prompt, generation_config=config, attention_mask=torch.ones_like(prompt))
        finally:
            own.eos_token_id = kept
        return [int(token) for token in out[0, len(key) :]]

    # -- the tokeniser -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """transformers' tokeniser, read from the original file."""
        return self._tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the generation configuration, the model configuration and the tokeniser, sorted."""
        found: set[int] = set()
        for value in (
            self._model.generation_config.eos_token_id,
            self._model.config.eos_token_id,
            self._tokenizer.eos_token_id,
        ):
            if value is not None:
                found.update(int(v) for v in (value if isinstance(value, (list, tuple)) else [value]))
        return tuple(sorted(found))

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation by the model's chat template, as ``apply_chat_template`` renders it."""
        ids = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
        )
        return [int(i) for i in ids]

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Text of a conversation by the model's chat template."""
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=add_generation_prompt, tokenize=False
            )
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text, with the special tokens that the tokeniser adds by itself."""
        return [int(i) for i in self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    # -- internals -----------------------------------------------------------------------------------------------------

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        key = tuple(int(i) for i in ids)
        limit = int(self._model.config.max_position_embeddings)
        if not 1 <= len(key) <= limit:
            raise OracleError(f"a sequence of {len(key)} tokens; this model takes 1 to {limit}")
        low, high = min(key), max(key)
        if low < 0 or high >= self.vocab_size:
            raise OracleError(f"token {low if low < 0 else high} is outside the vocabulary of {self.vocab_size}")
        return key

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        configure_torch(self.threads, self.device)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", FutureWarning)
            mode = stack.enter_context(Float64Islands()) if self.dtype == "float64" else None
            yield
            if mode is not None and mode.lifted == 0:
                raise OracleError("the float64 run lifted no float32 request: transformers changed, check the oracle")

    @functools.cached_property
    def rope_switch(self) -> int | None:
        """Length up to which LongRoPE's short frequencies hold; None for models with one set of frequencies."""
        rope = self._model.config.rope_parameters
        return int(rope["original_max_position_embeddings"]) if rope["rope_type"] == "longrope" else None

    def _run(self, keys: Sequence[tuple[int, ...]], starts: Sequence[int]) -> list[Forward]:
        switch = self.rope_switch
        if switch is None:
            return self._call(keys, starts)
        long = [i for i, key in enumerate(keys) if len(key) > switch]
        short = [i for i, key in enumerate(keys) if len(key) <= switch or starts[i] < switch]
        runs: dict[int, Forward] = {}
        if long:
            begins = [max(starts[i], switch) for i in long]
            runs = dict(zip(long, self._call([keys[i] for i in long], begins), strict=True))
        if short:
            parts = self._call([keys[i][:switch] for i in short], [starts[i] for i in short])
            for i, part in zip(short, parts, strict=True):
                whole = runs.get(i)
                joined = part if whole is None else replace(whole, start=part.start, logits=_join(part, whole))
                runs[i] = joined
        return [runs[i] for i in range(len(keys))]

    def _call(self, keys: Sequence[tuple[int, ...]], starts: Sequence[int]) -> list[Forward]:
        """One call of the model, over sequences on one side of ``rope_switch``."""
        width = max(map(len, keys))
        first = min(starts)
        padded = torch.tensor([list(key) + [0] * (width - len(key)) for key in keys], device=self.device)
        with self._running():
            # A cache without configuration: one with it forgets what a sliding window has left behind.
            cache = transformers.DynamicCache()
            out = self._model(input_ids=padded, cache=cache, use_cache=True, logits_to_keep=width - first)
        layers = _cache_of(out).layers
        runs = []
        found = {out.logits.dtype, *(getattr(layer, part).dtype for layer in layers for part in ("keys", "values"))}
        if found != {_DTYPES[self.dtype]}:
            raise OracleError(f"asked for {self.dtype}, got logits, K and V in {sorted(map(str, found))}")
        for row, (key, start) in enumerate(zip(keys, starts, strict=True)):
            logits = _array(out.logits[row, start - first : len(key) - first])
            k, v = (
                _stack([_array(getattr(layer, part)[row, :, : len(key)]) for layer in layers])
                for part in ("keys", "values")
            )
            runs.append(Forward(key, start, logits.copy(), k, v))
        return runs

    def _cached(self, key: tuple[int, ...], start: int) -> Forward | None:
        for known, run in self._cache.items():
            switch = self.rope_switch
            same_side = switch is None or (len(known) > switch) == (len(key) > switch)
            if run.start <= start and known[: len(key)] == key and same_side:
                self._cache.move_to_end(known)
                n = len(key)
                return Forward(key, start, run.logits[start - run.start : n - run.start], run.k[:, :n], run.v[:, :n])
        return None

    def _remember(self, run: Forward) -> None:
        for array in (run.logits, run.k, run.v):
            array.setflags(write=False)  # shared with every later caller
        self._cache[run.ids] = run
        self._cache.move_to_end(run.ids)
        while len(self._cache) > 1 and sum(item.nbytes for item in self._cache.values()) > self._cache_bytes:
            self._cache.popitem(last=False)


class _Source:
    """One model on disk, as transformers' loaders see it: a GGUF file, or a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.is_file() and path.suffix == ".gguf":
            self._where, self._arguments = str(path.parent), {"gguf_file": path.name}
        elif (path / "config.json").is_file():
            self._where, self._arguments = str(path), {}
        else:
            raise OracleError(f"{path}: neither a .gguf file nor a directory with config.json")
        self._config: Any = None
        self._tokenizer: Any = None
        self._gguf_reader = functools.cache(gguf.GGUFReader)

    def model(self, dtype: torch.dtype, attention: str) -> Any:
        arguments: dict[str, Any] = dict(self._arguments)
        if arguments:
            # Packed weights would go through float32 kernels whatever the dtype.
            arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
        with self._loading():
            if self._config is None:
                self._config = transformers.AutoConfig.from_pretrained(self._where, **self._arguments)
                if arguments:
                    _check_gguf(self._path, self._config)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                self._where,
                config=copy.deepcopy(self._config),
                dtype=dtype,
                attn_implementation=attention,
                experts_implementation="eager",  # the modelling code's own loop, instead of grouped products
                local_files_only=True,
                **arguments,
            )
        return model.eval()

    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            with self._loading():
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                    self._where, local_files_only=True, **self._arguments
                )
            if self._path.is_file():
                mend_pre_tokenizer(self._tokenizer, self._path)
        return self._tokenizer

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        try:
            with quiet(), self._parsed_once():
                yield
        except Exception as error:  # a bad file raises anything, struct.error for one, deep inside the loaders
            raise OracleError(f"{self._path}: transformers cannot load it: {error}") from error

    @contextlib.contextmanager
    def _parsed_once(self) -> Iterator[None]:
        """Let transformers' loader parse the file's header and build its table of names once, not at every call.

        The ``gguf`` package needs seconds for each, and configuration, tokeniser and both models ask anew.
        """
        reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = self._gguf_reader, functools.cache(name_map)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


def _check_gguf(path: Path, config: Any) -> None:
    """Refuse a file whose RoPE scaling or window transformers (5.24) does not read: it would judge another model."""
    header = read_header(path)
    prefix = header.metadata.get("general.architecture")
    scaling = header.metadata.get(f"{prefix}.rope.scaling.type", "none")
    tables = [name for name in header.tensors if name.startswith(("rope_freqs", "rope_factors"))]
    used = config.rope_parameters["rope_type"]
    if used == "default" and (scaling != "none" or tables):
        raise OracleError(f"RoPE scaling {scaling!r} with tables {tables} would be ignored; use the original directory")
    window = int(header.metadata.get(f"{prefix}.attention.sliding_window") or 0) or None
    assumed = getattr(config, "sliding_window", None)
    if window != assumed and min(window or assumed or 0, assumed or window or 0) < config.max_position_embeddings:
        raise OracleError(f"the file's sliding window is {window}, {assumed} would be used; use the original directory")


def _array(values: torch.Tensor) -> Array:
    """On the host; NumPy has no bfloat16, whose values float32 holds as they are."""
    return cast(Array, (values.float() if values.dtype is torch.bfloat16 else values).cpu().numpy())


def _stack(layers: Sequence[Array]) -> Any:
    """[heads, positions, dim] of each layer as [layers, positions, heads, dim]."""
    return np.stack([layer.swapaxes(0, 1) for layer in layers])


def _join(short: Forward, whole: Forward) -> Array:
    """Logits of the rows of both, one after the other."""
    joined: Array = np.concatenate([short.logits, whole.logits])
    return joined


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars."""
    progress = transformers.utils.logging
    enabled = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            progress.enable_progress_bar()


def _cache_of(output: Any) -> Any:
    """The KV cache of a model output; the attribute was renamed within transformers 5."""
    cache = output.get("cache")
    return output.past_key_values if cache is None else cache
