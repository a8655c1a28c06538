"""Incremental detokenisation against the full decode."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from blink_core.frontend.detokenizer import UnsupportedDecoder, detokenizer_factory
from blink_core.frontend.tokenizer import Tokenizer

UNICODE = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("😀👨‍👩‍👧日本語éñ\u200d\ufffd🇩🇪 \n1")), max_size=40
)


def pieces(tokenizer: Tokenizer | tokenizers.Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.detokenizer() if isinstance(tokenizer, Tokenizer) else detokenizer_factory(tokenizer)()
    return [*(stream.push(token) for token in ids), stream.finish()]


def byte_fallback_backend(*, strip: bool) -> tokenizers.Tokenizer:
    """A SentencePiece-like vocabulary: 256 byte tokens, a few words, two special tokens, one shown added token."""
    words = ["▁", "▁a", "b", "é", "日", "▁▁x", "<0x", "<0xZZ>", "<0x0>"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip else stages)
    return backend


@given(ids=st.lists(st.integers(0, 49_151), max_size=60))
@example(ids=[1, 2, 0, 16])
@example(ids=[49_151, 60_000, 5])
def test_byte_level_concatenation_equals_full_decode(smollm: Tokenizer, ids: list[int]) -> None:
    """Catches: bytes lost, repeated or flushed early (T02), special tokens shown, unknown ids that raise."""
    assert "".join(pieces(smollm, ids)) == smollm.decode(ids)


@given(raw=st.lists(st.integers(0, 255), max_size=24))
@example(raw=[0xE2, 0x82, 0x41])
@example(raw=[0xF0, 0x9F, 0x98])
@example(raw=[0xED, 0xA0, 0x80, 0xC0, 0xAF, 0xF5])
def test_arbitrary_bytes_one_token_each(tiny: Tokenizer, raw: list[int]) -> None:
    """Catches: invalid UTF-8 replaced otherwise than by the full decode when it arrives byte by byte."""
    assert "".join(pieces(tiny, raw)) == tiny.decode(raw)


@given(text=UNICODE)
def test_text_streams_in_whole_characters(tiny: Tokenizer, text: str) -> None:
    """Catches: a character split over two pieces, and one held back although all its bytes are there."""
    stream = tiny.detokenizer()
    shown = ""
    for byte in text.encode():
        shown += stream.push(byte)
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


def test_cut_inside_an_emoji_ends_with_the_replacement_character(smollm: Tokenizer) -> None:
    """Catches: fault T03, max_tokens inside a character giving an error, or nothing, instead of U+FFFD."""
    ids = smollm.encode_rendered("ok 🦙")
    assert len(ids) > 3
    for end in range(2, len(ids)):
        assert "".join(pieces(smollm, ids[:end])) == smollm.decode(ids[:end])
    assert smollm.decode(ids[:-1]).endswith("\ufffd")


def test_incomplete_bytes_before_a_space_token_are_kept(tiny: Tokenizer) -> None:
    """Catches: fault T02, a flush rule that drops or moves incomplete bytes when a space-leading token follows."""
    ids = [0xF0, 0x9F, 0x20, 0x78]
    assert "".join(pieces(tiny, ids)) == tiny.decode(ids) == "\ufffd x"


def test_added_tokens_that_are_not_special_are_shown(tiny: Tokenizer) -> None:
    """Catches: user-defined tokens such as <think> hidden with the special ones."""
    ids = tiny.encode_rendered("<think>a<|im_end|>")
    assert "".join(pieces(tiny, ids)) == "<think>a"


@pytest.mark.parametrize("strip", [True, False])
@given(data=st.data())
def test_byte_fallback_concatenation_equals_full_decode(strip: bool, data: st.DataObject) -> None:
    """Catches: runs of byte tokens, the stripped first space or `<0x..>` look-alikes treated otherwise than decode."""
    backend = byte_fallback_backend(strip=strip)
    interesting = st.sampled_from([1 + b for b in "é😀a ".encode()])
    ids = data.draw(st.lists(st.one_of(st.integers(0, backend.get_vocab_size() + 1), interesting), max_size=24))
    assert "".join(pieces(backend, ids)) == backend.decode(ids, skip_special_tokens=True)


def test_unsupported_decoder_is_named() -> None:
    """Catches: a tokeniser whose decoder would be run wrongly, accepted at load time."""
    backend = byte_fallback_backend(strip=True)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedDecoder, match="WordPiece"):
        detokenizer_factory(backend)
