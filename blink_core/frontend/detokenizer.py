"""Incremental detokenisation: token ids in, whole characters out (design section 8; faults T02, T03).

The concatenation of everything returned equals `tokenizers`' full decode of the ids with special tokens skipped,
incomplete bytes at the end included (they become U+FFFD). A character is returned only when all its bytes are there.
Constant amortised work a token: no text is decoded twice.

Two decoders of `tokenizer.json` are known, which cover byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and
SentencePiece-style BPE with byte fallback (Llama 2, Mistral, Phi-3). Any other is refused when the model is loaded.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoder(ValueError):
    """The tokeniser's decoder is none that can be run incrementally here."""


class Detokenizer(Protocol):
    """State of one output stream."""

    def push(self, token: int) -> str:
        """Take one token id; return the characters that became complete, often none."""
        ...

    def finish(self) -> str:
        """End of stream: return what is left, incomplete bytes as U+FFFD."""
        ...


class DetokenizerFactory(Protocol):
    """Makes one `Detokenizer` a stream; holds the vocabulary tables that streams share."""

    def __call__(self) -> Detokenizer: ...

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the text, by itself; b"" for ids that never show."""
        ...


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: the printable Latin-1 bytes stand for themselves, the other
    68 are spelled U+0100, U+0101, ... in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spelling = {chr(byte): byte for byte in printable}
    spelling.update({chr(0x100 + n): byte for n, byte in enumerate(b for b in range(256) if b not in printable)})
    return spelling


class _Vocabulary:
    """Lazily resolved pieces of a vocabulary; `None` for ids that never show (special, or not in the vocabulary)."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._hidden = {token.content for token in added.values() if token.special}

    def piece(self, token: int) -> str | None:
        text = self._backend.id_to_token(token) if token >= 0 else None
        return None if text is None or text in self._hidden else text


class ByteLevelFactory:
    """For the `ByteLevel` decoder: a token is a string of bytes spelled as characters."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._vocabulary = _Vocabulary(backend)
        self._alphabet = byte_alphabet()
        self._cache: dict[int, bytes] = {}

    def __call__(self) -> Detokenizer:
        return _ByteLevelStream(self)

    def token_bytes(self, token: int) -> bytes:
        found = self._cache.get(token)
        if found is None:
            piece = self._vocabulary.piece(token) or ""
            if all(char in self._alphabet for char in piece):
                found = bytes(self._alphabet[char] for char in piece)
            else:  # an added token, spelled as plain text
                found = piece.encode("utf-8")
            self._cache[token] = found
        return found


class _ByteLevelStream:
    __slots__ = ("_bytes", "_utf8")

    def __init__(self, factory: ByteLevelFactory) -> None:
        self._bytes = factory.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class _FallbackRules:
    replacements: tuple[tuple[str, str], ...]
    strip_char: str
    strip_count: int


class ByteFallbackFactory:
    """For `Sequence[Replace..., ByteFallback, Fuse, Strip?]`: tokens are text, except `<0xNN>`, which is one byte.

    The full decode takes a run of byte tokens as one unit (one invalid byte turns the whole run into U+FFFD), so a run
    is shown only when a text token ends it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, rules: _FallbackRules) -> None:
        self._vocabulary = _Vocabulary(backend)
        self.rules = rules
        self._cache: dict[int, str | int | None] = {}

    def __call__(self) -> Detokenizer:
        return _ByteFallbackStream(self)

    def token_bytes(self, token: int) -> bytes:
        unit = self.unit(token)
        if unit is None:
            return b""
        return bytes([unit]) if isinstance(unit, int) else unit.encode("utf-8")

    def unit(self, token: int) -> str | int | None:
        """Text, or a byte value, or None for a token that never shows."""
        if token in self._cache:
            return self._cache[token]
        unit: str | int | None = self._vocabulary.piece(token)
        if isinstance(unit, str):
            for pattern, content in self.rules.replacements:
                unit = unit.replace(pattern, content)
            match = _BYTE_TOKEN.fullmatch(unit)
            if match:
                unit = int(match[1], 16)
        self._cache[token] = unit
        return unit


class _ByteFallbackStream:
    __slots__ = ("_char", "_factory", "_run", "_strip")

    def __init__(self, factory: ByteFallbackFactory) -> None:
        self._factory = factory
        self._run = bytearray()
        self._char = factory.rules.strip_char
        self._strip = factory.rules.strip_count

    def push(self, token: int) -> str:
        unit = self._factory.unit(token)
        if unit is None:
            return ""
        if isinstance(unit, int):
            self._run.append(unit)
            return ""
        return self._strip_start(self._end_run() + unit)

    def finish(self) -> str:
        return self._strip_start(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip_start(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._char):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


def detokenizer_factory(backend: tokenizers.Tokenizer) -> DetokenizerFactory:
    """Choose by the decoder that the tokeniser declares. Raises UnsupportedDecoder."""
    # A component pickles as its part of tokenizer.json; writing the whole file out would take the vocabulary with it.
    decoder: dict[str, Any] | None = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    stages = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return ByteLevelFactory(backend)
    rules = _fallback_rules(stages)
    if rules is not None:
        return ByteFallbackFactory(backend, rules)
    raise UnsupportedDecoder(
        f"the tokeniser's decoder {kinds or 'none'} is not supported; supported: ByteLevel, and "
        "Sequence[Replace, ByteFallback, Fuse, Strip]"
    )


def _fallback_rules(stages: list[dict[str, Any]]) -> _FallbackRules | None:
    """Rules of a byte-fallback sequence, or None if `stages` is not one."""
    rest = list(stages)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        stage = rest.pop(0)
        replacements.append((stage["pattern"]["String"], stage["content"]))
    if [stage["type"] for stage in rest[:2]] != ["ByteFallback", "Fuse"]:
        return None
    rest = rest[2:]
    if not rest:
        return _FallbackRules(tuple(replacements), " ", 0)
    if len(rest) == 1 and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        return _FallbackRules(tuple(replacements), rest[0]["content"], rest[0]["start"])
    return None
