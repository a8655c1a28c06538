"""The tokeniser's ids against transformers' AutoTokenizer."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blink_core.frontend.detokenizer import byte_alphabet
from blink_core.frontend.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from blink_core.frontend.tokenizer_gguf import SUPPORTED_PRE, tokenizer_from_metadata

CORPUS = [
    "Hello world, it's a test.  We'll see\n\n1. one\n2. two 1234567 x=42;",
    "Grüße aus Köln, 日本語のテキスト, emoji 😀👨‍👩‍👧, e\u0301 and \u00e9.",
    "def f(x):\n    return x ** 2  # 3.14\r\n\tend  \n",
]
PIECE = st.one_of(
    st.characters(codec="utf-8"),
    st.sampled_from([*"  \n\n\t\r1234'sdtveé日😀²½e\u0301.,=<|>"]),
    st.sampled_from(
        [" don't", "I'LL", "\n\n1.", "  42", "<|im_start|>", "<|im_end|>\n", "<|begin|>", "<think>", "Hello"]
    ),
)
TEXTS = st.lists(PIECE, max_size=40).map("".join)


@given(text=TEXTS)
@example(text="list:\n\n1. one\n\n2. two   33")
@example(text="")
def test_real_model_ids_equal_transformers(smollm: Tokenizer, reference: PreTrainedTokenizerBase, text: str) -> None:
    """Catches: any difference in splitting, merging or special tokens between Blink and transformers."""
    assert smollm.encode(text) == reference(text)["input_ids"]
    ids = smollm.encode_rendered(text)
    assert ids == reference(text, add_special_tokens=False)["input_ids"]
    assert smollm.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@given(text=st.text(st.sampled_from("abc XYZ.,'s\n"), max_size=60))
def test_without_digits_the_unmodified_loader_agrees(
    smollm: Tokenizer, unmodified: PreTrainedTokenizerBase, text: str
) -> None:
    """Catches: a reference that agrees only because this test changed it."""
    assert smollm.encode(text) == unmodified(text)["input_ids"]


def test_digits_are_split_from_the_whitespace_before_them(smollm: Tokenizer) -> None:
    """Catches: GPT-2 splitting used for "smollm": two newlines before a digit must be one token, as in training."""
    both, one = smollm.encode("\n\n"), smollm.encode("1")
    assert len(both) == 1
    assert smollm.encode("\n\n1") == both + one
    assert smollm.encode("1" * 5) == one * 5


def test_special_tokens_of_the_real_model(smollm: Tokenizer) -> None:
    """Catches: wrong special ids, or special tokens in the text cut into pieces."""
    assert (smollm.bos_token_id, smollm.eos_token_id, smollm.eos_token_ids) == (1, 2, (2,))
    assert smollm.encode("<|im_start|>") == [1]
    assert smollm.special_token_id("<|im_end|>") == 2
    assert smollm.special_token_id("the") is None
    assert smollm.vocab_size == 49_152


def trained(pre: pre_tokenizers.PreTokenizer) -> tuple[list[str], list[str]]:
    """Vocabulary in id order and merges of a byte-level BPE trained on CORPUS."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre
    alphabet = sorted(byte_alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 20, trainer)
    vocabulary = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(merge) for merge in merges]


def write_gguf(path: Path, pre: str, *, add_bos: bool) -> int:
    """A GGUF file with a trained tokeniser and no tensors; returns the id of BOS."""
    tokens, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    bos = len(tokens)
    tokens += ["<|begin|>", "<|eot|>", "<think>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * bos + [3, 3, 4])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(bos + 1)
    writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return bos


@pytest.mark.parametrize("pre", SUPPORTED_PRE)
@settings(max_examples=40)
@given(data=st.data())
def test_every_pre_tokeniser_equals_transformers(
    pre: str, data: st.DataObject, gguf_pairs: dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]]
) -> None:
    """Catches: a wrong split pattern, normaliser, merge rule or BOS for one of the supported names."""
    ours, theirs = gguf_pairs[pre]
    text = data.draw(TEXTS)
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode_rendered(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def gguf_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, PreTrainedTokenizerBase]]:
    """For each name: Blink's tokeniser and transformers', given what its GGUF reader leaves out (see `reference`)."""
    folder = tmp_path_factory.mktemp("gguf")
    pairs = {}
    for pre in SUPPORTED_PRE:
        path = folder / f"{pre}.gguf"
        write_gguf(path, pre, add_bos=pre.startswith("llama"))
        theirs = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
        if pre in ("smollm", "starcoder"):
            theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        elif pre.startswith("llama"):
            model = theirs.backend_tokenizer.model
            model.ignore_merges = True
        elif pre == "qwen2":
            theirs.backend_tokenizer.normalizer = normalizers.NFC()
        pairs[pre] = (load_tokenizer(path), theirs)
    return pairs


def test_bos_is_added_where_the_file_says_so_and_once(tmp_path: Path) -> None:
    """Catches: BOS missing from plain text, or added to a rendered template that has its own (T11)."""
    bos = write_gguf(tmp_path / "m.gguf", "llama-bpe", add_bos=True)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert tokenizer.encode("a")[0] == bos
    assert tokenizer.encode_rendered("<|begin|>a").count(bos) == 1
    assert bos not in tokenizer.encode_rendered("a")


def test_special_tokens_map_counts_as_in_transformers(tmp_path: Path) -> None:
    """Catches: the legacy special_tokens_map.json ignored, or taken where added_tokens_decoder replaces it."""
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    for config in ({"eos_token": "<s>"}, {"eos_token": "<s>", "added_tokens_decoder": {}}):
        theirs = save_directory(tmp_path, plain_backend(), **config)
        ours = load_tokenizer(tmp_path)
        assert ours.special_tokens == theirs.special_tokens_map
        assert ours.eos_token_ids == (theirs.eos_token_id,)


def save_directory(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> PreTrainedTokenizerBase:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder)


def plain_backend() -> tokenizers.Tokenizer:
    tokens, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    vocabulary = {token: index for index, token in enumerate([*tokens, "<s>", "</s>"])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[(m.split(" ")[0], m.split(" ")[1]) for m in merges])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return backend


def with_bos_processor(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    special = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    return backend


TOKEN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


@pytest.mark.parametrize(
    ("processor", "config"),
    [
        (False, {"bos_token": "<s>", "eos_token": "</s>"}),
        (True, {"bos_token": "<s>", "eos_token": "</s>"}),
        (True, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}),
        (False, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}),
        (
            False,
            {
                "bos_token": {"__type": "AddedToken", "content": "<s>", **TOKEN},
                "eos_token": "</s>",
                "pad_token": "<new pad>",
            },
        ),
        (True, {"bos_token": "<s>", "added_tokens_decoder": {"900": {"content": "<tool>", **TOKEN, "special": False}}}),
        (True, {"bos_token": "<s>", "additional_special_tokens": ["<|x|>"]}),
    ],
)
def test_directory_equals_transformers(tmp_path: Path, processor: bool, config: dict[str, Any]) -> None:
    """Catches: BOS/EOS flags, post-processor or tokens of tokenizer_config.json handled otherwise than transformers."""
    backend = with_bos_processor(plain_backend()) if processor else plain_backend()
    theirs = save_directory(tmp_path, backend, **config)
    ours = load_tokenizer(tmp_path)
    for text in [*CORPUS, "<s>a</s> <tool><|x|> b<new pad>", ""]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_rendered(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id


def test_directory_with_truncation_enabled_is_not_truncated(tmp_path: Path) -> None:
    """Catches: prompts silently cut because tokenizer.json was saved with truncation or padding on."""
    backend = plain_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    save_directory(tmp_path, backend)
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode(CORPUS[0])) == CORPUS[0]


def test_chat_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    """Catches: an outdated template taken from tokenizer_config.json, or a list of templates not understood."""
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    save_directory(tmp_path, plain_backend(), chat_template=named)
    assert load_tokenizer(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "J"


GOOD = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "mystery"}, "'mystery' is not supported; supported: default, gpt-2, llama-bpe"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "None is not supported"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "1 tokens of the vocabulary are duplicates"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "'a b c' is not two tokens"),
        ({"tokenizer.ggml.merges": ["a x"]}, "do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "3 tokens but 1 token types"),
        ({"tokenizer.ggml.bos_token_id": 3}, "bos_token_id 3 is outside the vocabulary of 3"),
    ],
)
def test_bad_metadata_is_refused_with_the_value(change: dict[str, Any], message: str) -> None:
    """Catches: a damaged or unknown tokeniser that loads and gives plausible, wrong ids."""
    assert tokenizer_from_metadata(GOOD).encode("ab") == [2]
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_metadata({**GOOD, **change})


def test_truncated_gguf_is_refused_at_every_length(tmp_path: Path) -> None:
    """Catches: a truncated file read beyond its end, or an error that is not a TokenizerError."""
    write_gguf(tmp_path / "whole.gguf", "smollm", add_bos=False)
    whole = (tmp_path / "whole.gguf").read_bytes()
    load_tokenizer(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 7, 8, 23, 24, 31, *range(40, len(whole) - 40, max(1, len(whole) // 40))]:
        cut.write_bytes(whole[:length])
        with pytest.raises(TokenizerError):
            load_tokenizer(cut)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"x", "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**61), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), "not UTF-8"),
    ],
)
def test_damaged_gguf_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    """Catches: lengths of a damaged file believed, up to allocating them."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """Catches: a bare KeyError or OSError for a wrong path."""
    with pytest.raises(TokenizerError, match="no such model"):
        load_tokenizer(tmp_path / "nothing.gguf")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
