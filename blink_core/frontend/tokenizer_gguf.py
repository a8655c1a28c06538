"""Tokeniser from GGUF metadata: byte-level BPE (`tokenizer.ggml.model` = "gpt2").

A GGUF file carries vocabulary and merges but no `tokenizer.json`; how text is cut before merging is named by
`tokenizer.ggml.pre`, which is llama.cpp's name for it. A wrong cut gives plausible but wrong ids, so an unknown name
is an error, never a guess. `transformers`' own GGUF reader does guess there: it ignores the digit split of "smollm" (so
that "\\n\\n1." gets other ids than the model was trained with), `ignore_merges` of "llama-bpe" and the NFC of "qwen2".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from blink_core.frontend.gguf_metadata import GgufError, read_gguf_metadata
from blink_core.frontend.tokenizer import Tokenizer, TokenizerError, build_tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# The split patterns are part of the models' published tokenizer.json files.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Pre:
    """What one value of `tokenizer.ggml.pre` stands for."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False  # a word that is a token stays whole, whatever the merges say
    nfc: bool = False
    add_bos: bool = False  # where the file has no tokenizer.ggml.add_bos_token


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3 = _Pre(_split(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
_PRE: dict[str, _Pre] = {
    "default": _Pre(_gpt2),
    "gpt-2": _Pre(_gpt2),
    "smollm": _Pre(_digits_then_gpt2),
    "starcoder": _Pre(_digits_then_gpt2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Pre(_split(_QWEN2_SPLIT), nfc=True),
}
SUPPORTED_PRE = tuple(sorted(_PRE))


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Load the tokeniser of a GGUF file. Raises TokenizerError for a damaged file or an unsupported tokeniser."""
    try:
        return tokenizer_from_metadata(read_gguf_metadata(path), name=path.name)
    except (GgufError, OSError) as error:
        raise TokenizerError(str(error)) from None


def tokenizer_from_metadata(metadata: dict[str, Any], *, name: str = "GGUF") -> Tokenizer:
    """Build from the key-value pairs of a GGUF file; `name` is used in messages. Raises TokenizerError."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(f"{name}: tokeniser model {model!r} is not supported; supported: gpt2 (byte-level BPE)")
    pre_name = metadata.get("tokenizer.ggml.pre", "default")
    pre = _PRE.get(pre_name)
    if pre is None:
        raise TokenizerError(
            f"{name}: pre-tokeniser {pre_name!r} is not supported; supported: {', '.join(SUPPORTED_PRE)}"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens", name)
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise TokenizerError(f"{name}: {len(tokens)} tokens but {len(kinds)} token types")

    backend = tokenizers.Tokenizer(_bpe(tokens, _strings(metadata, "tokenizer.ggml.merges", name), pre, name))
    backend.normalizer = normalizers.NFC() if pre.nfc else None
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()

    special = _named_tokens(metadata, tokens, name)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    control += [text for text in special.values() if text not in control]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in dict.fromkeys(control)])
    # User-defined tokens ("<think>") are matched whole in text, and shown.
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _USER_DEFINED and token not in special.values()
        ]
    )
    bos, eos = special.get("bos_token"), special.get("eos_token")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    _set_bos_eos(
        backend,
        bos=(bos, tokens.index(bos)) if bos is not None and add_bos else None,
        eos=(eos, tokens.index(eos)) if eos is not None and add_eos else None,
    )
    if backend.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise TokenizerError(
            f"{name}: {len(tokens)} tokens in the file but {backend.get_vocab_size(with_added_tokens=True)} loaded"
        )
    ends = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {metadata[key] for end in ends if isinstance(metadata.get(key := f"tokenizer.ggml.{end}"), int)}
    template = metadata.get("tokenizer.chat_template")
    return build_tokenizer(
        backend,
        special_tokens=special,
        eos_token_ids=tuple(sorted(ids)),
        chat_template=template if isinstance(template, str) else None,
    )


def _bpe(tokens: list[str], merge_lines: list[str], pre: _Pre, name: str) -> models.BPE:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise TokenizerError(f"{name}: {len(tokens) - len(vocabulary)} tokens of the vocabulary are duplicates")
    merges: list[tuple[str, str]] = []
    for line in merge_lines:
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise TokenizerError(f"{name}: merge {line!r} is not two tokens separated by one space")
        merges.append((left, right))
    try:
        return models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{name}: vocabulary and merges do not fit: {error}") from None


def _set_bos_eos(backend: tokenizers.Tokenizer, *, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Make `encode` put `bos` before and `eos` behind the text (each token text and id, or None)."""
    parts = ([f"{bos[0]}:0"] if bos else []) + ["$A:0"] + ([f"{eos[0]}:0"] if eos else [])
    specials = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=specials)


def _strings(metadata: dict[str, Any], key: str, name: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise TokenizerError(f"{name} has no {key}")
    return value


def _named_tokens(metadata: dict[str, Any], tokens: list[str], name: str) -> dict[str, str]:
    """Named special tokens in the order transformers lists them."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named: dict[str, str] = {}
    for special, key in keys.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        if not 0 <= token < len(tokens):
            raise TokenizerError(f"{name}: {key}_token_id {token} is outside the vocabulary of {len(tokens)}")
        named[special] = tokens[token]
    return named
