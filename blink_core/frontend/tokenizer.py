"""The model's own tokeniser, through HuggingFace `tokenizers` alone (design section 8).

Two sources: a HuggingFace directory (`tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`) and the
metadata of a GGUF file (`tokenizer_gguf`). Ids equal those of `transformers.AutoTokenizer`; tests compare them.

`encode` adds BOS/EOS as the model's post-processor says; text that a chat template rendered is encoded with
`encode_rendered`, which adds none, because the template writes its own (fault T11, two BOS).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from blink_core.frontend.detokenizer import Detokenizer, DetokenizerFactory, UnsupportedDecoder, detokenizer_factory

# The names transformers gives its named special tokens, in the order it uses them.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """The model's tokeniser cannot be loaded; the message says which file and why."""


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokeniser.

    special_tokens: named special tokens ("bos_token", ...) to their text, as a chat template sees them.
    eos_token_ids: ids that the tokeniser's own files call end of sequence or of turn; the engine's set is the union
    with the model configuration's (fault T09). chat_template: Jinja source, or None if the model brings none.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | None = field(repr=False)
    _detokenizers: DetokenizerFactory = field(repr=False)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. The model's may be larger (padding rows)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with BOS/EOS where the model wants them. Releases the GIL while it works."""
        return self._encode(text, add_special_tokens=True)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of text from a chat template: no BOS/EOS beyond those in the text."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # `encode` holds the GIL, seconds for a megabyte; the batch call does not, and skips the offsets.
        return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: list[int]) -> str:
        """Full decode, special tokens skipped."""
        return str(self.backend.decode(ids, skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token, often part of a character; a special token as it is spelled, b"" for an id without a
        piece (models have padding rows beyond their vocabulary)."""
        found = self._detokenizers.token_bytes(token)
        if found or token < 0:
            return found
        return (self.backend.id_to_token(token) or "").encode("utf-8")

    def special_token_id(self, text: str) -> int | None:
        """Id of the special token spelled `text`, which the decoded output never shows; None if it is not one."""
        token = self.backend.token_to_id(text)
        if token is None:
            return None
        added = self.backend.get_added_tokens_decoder().get(token)
        return token if added is not None and added.special else None

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokeniser for one output stream."""
        return self._detokenizers()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load from a `.gguf` file or a HuggingFace directory. Raises TokenizerError."""
    source = Path(path)
    if source.is_dir():
        return _load_directory(source)
    if not source.exists():
        raise TokenizerError(f"no such model: {source}")
    if source.suffix != ".gguf":
        raise TokenizerError(f"{source.name} is neither a .gguf file nor a HuggingFace directory")
    from blink_core.frontend.tokenizer_gguf import load_gguf_tokenizer

    return load_gguf_tokenizer(source)


def build_tokenizer(
    backend: tokenizers.Tokenizer,
    *,
    special_tokens: dict[str, str],
    eos_token_ids: tuple[int, ...],
    chat_template: str | None,
) -> Tokenizer:
    """Wrap a `tokenizers` object; truncation and padding, which some files enable, are off. Raises TokenizerError."""
    backend.no_truncation()
    backend.no_padding()
    try:
        factory = detokenizer_factory(backend)
    except UnsupportedDecoder as error:
        raise TokenizerError(str(error)) from None
    return Tokenizer(backend, special_tokens, eos_token_ids, chat_template, factory)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path.name}: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path.name} holds {type(content).__name__}, not an object")
    return content


def _token_text(value: Any) -> str | None:
    """Token text of a config entry: a string, or an AddedToken written as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _added_token(value: Any, *, special: bool) -> AddedToken | None:
    text = _token_text(value)
    if text is None:
        return None
    options = value if isinstance(value, dict) else {}
    special = bool(options.get("special", special))
    return AddedToken(
        text,
        single_word=bool(options.get("single_word", False)),
        lstrip=bool(options.get("lstrip", False)),
        rstrip=bool(options.get("rstrip", False)),
        normalized=bool(options.get("normalized", not special)),
        special=special,
    )


def _load_directory(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.exists():
        raise TokenizerError(f"{directory} has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{file.name}: {error}") from None
    config = _read_json(directory / "tokenizer_config.json")
    # As in transformers: the older file counts only where the newer way of naming added tokens is not used. The flags
    # `add_bos_token` and `add_eos_token` do not count at all, because tokenizer.json has its post-processor.
    legacy = {} if "added_tokens_decoder" in config else _read_json(directory / "special_tokens_map.json")
    named = {**config, **legacy}
    _add_missing_tokens(backend, config, named)
    special = {name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(named.get(name))) is not None}
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return build_tokenizer(
        backend,
        special_tokens=special,
        eos_token_ids=() if eos is None else (eos,),
        chat_template=_directory_template(directory, config),
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, Any]) -> None:
    """Add tokens that the configuration names and `tokenizer.json` lacks, in order of id, as transformers does."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: list[AddedToken] = []
    decoder = config.get("added_tokens_decoder") or {}
    candidates = [_added_token(value, special=False) for _, value in sorted(decoder.items(), key=lambda kv: int(kv[0]))]
    candidates += [_added_token(named.get(name), special=True) for name in SPECIAL_TOKEN_NAMES]
    extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    if isinstance(extra, list):
        candidates += [_added_token(value, special=True) for value in extra]
    for token in candidates:
        if token is not None and token.content not in present:
            present.add(token.content)
            missing.append(token)
    if missing:
        backend.add_tokens(missing)


def _directory_template(directory: Path, config: dict[str, Any]) -> str | None:
    """`chat_template.jinja` goes before the configuration's entry; a list of named templates means its "default"."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
