"""Text by itself: incremental detokenisation, stop strings, prompt ids; class T.

The references are the `tokenizers` library's own full decode and `transformers`' chat template on the same files.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from verification.mutants.checkers.base import Checker
from verification.mutants.checkers.drawn import DrawnChecker, Wrong
from verification.mutants.parts import Parts
from verification.mutants.references import model_path, remembered

LOAD = "blink_core.frontend.tokenizer:load_tokenizer"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] == 'user' %}\n"
    "[{{ message['content'] }}]\n"
    "    {% else %}\n"
    "({{ message['content'] }}{{ eos_token }})\n"
    "    {% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}>{% endif %}"
)


@functools.cache
def folders(scratch: Path) -> dict[str, Path]:
    """Tokenisers in a folder of `scratch`: byte-level as it is, byte-level that adds BOS and has a template with blocks
    on lines of their own, and SentencePiece-like with byte fallback."""
    plain = model_path("mistral-full")
    root = Path(tempfile.mkdtemp(dir=scratch))
    made = {"byte-level": plain}
    with_bos = made["with BOS"] = root / "bos"
    shutil.copytree(plain, with_bos, ignore=shutil.ignore_patterns("*.safetensors"))
    backend = tokenizers.Tokenizer.from_file(str(plain / "tokenizer.json"))
    start = ("<|im_start|>", 1)
    backend.post_processor = processors.TemplateProcessing(single=[f"{start[0]}:0", "$A:0"], special_tokens=[start])
    backend.save(str(with_bos / "tokenizer.json"))
    (with_bos / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    fallback = made["byte fallback"] = root / "fallback"
    fallback.mkdir()
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "a", "b"]
    vocabulary += ["ab", "\u2581\u2581", "é", "ß", "\u2581x", "end", "."]
    bpe = models.BPE({text: i for i, text in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    spm = tokenizers.Tokenizer(bpe)
    spm.add_special_tokens([AddedToken(text, special=True) for text in vocabulary[:3]])
    stages = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    spm.decoder = decoders.Sequence(stages)
    spm.save(str(fallback / "tokenizer.json"))
    (fallback / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return made


DETOKENISED = {"text of the ids": frozenset("T"), "whole characters": frozenset("T")}
SAMPLES = ("Wärter zählt 7 Schiffe 🙂🚀 日本語の文章", "Le gardien écrit: naïve café — “ok” ₿ 🤷🏽‍♀️")


def check_detokeniser(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """What comes out token by token is the full decode, and shows no character before it is whole."""
    for kind, folder in folders(scratch).items():
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        loaded, size = parts.keep(LOAD, folder), backend.get_vocab_size()
        for number in range(8):
            if number < 2 and kind != "byte fallback":
                ids = backend.encode(SAMPLES[number], add_special_tokens=False).ids
                ids = ids[: len(ids) - rng.randrange(4)]  # may end within a character
            elif number % 2:
                raw = "".join(rng.choice(SAMPLES) for _ in range(2)).encode()[: rng.randrange(20, 60)]
                ids = [i for token in _bytes_of(raw, kind) if (i := backend.token_to_id(token)) is not None]
                for _ in range(3):
                    ids.insert(rng.randrange(len(ids) + 1), rng.randrange(size))
            elif number % 4 == 2:  # text rather than bytes, and spaces at the beginning and later
                ids = [rng.randrange(259, size) for _ in range(20)]
                ids[0], ids[7] = (261, 260) if number == 2 else (260, 261)
            else:
                ids = [rng.randrange(size) for _ in range(40)]
                ids[rng.randrange(40)] = 0
                ids[rng.randrange(1, 40)] = 2
            stream = loaded.keep("detokenizer")
            pieces = [stream.call("push", i) for i in ids]
            shown = "".join(pieces) + stream.call("finish")
            expected = backend.decode(ids, skip_special_tokens=True)
            if shown.count(REPLACEMENT) != expected.count(REPLACEMENT):
                return "whole characters", f"{kind}: {shown!r} from {ids}, the full decode is {expected!r}"
            if shown != expected:
                return "text of the ids", f"{kind}: {shown!r} from {ids}, the full decode is {expected!r}"
    return None


def _bytes_of(raw: bytes, kind: str) -> list[str]:
    """Tokens of single bytes in the spelling of a tokeniser."""
    if kind == "byte fallback":
        return [f"<0x{byte:02X}>" for byte in raw]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    rest = sorted(set(alphabet) - printable, key=ord)
    others = [b for b in range(256) if chr(b) not in printable]
    spelled = {ord(char): char for char in printable} | dict(zip(others, rest, strict=True))
    return [spelled[byte] for byte in raw]


STOPS = {"text before the stop string": frozenset("T")}


def check_stops(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """Pieces of a small alphabet, stop strings that overlap each other: the text ends where the first one begins that
    is complete, wherever pieces are cut, and nothing of it is shown."""
    for _ in range(30):
        text = "".join(rng.choice("abc \n") for _ in range(rng.randrange(1, 50)))
        stops = ["".join(rng.choice("abc ") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.5:  # one that ends within the beginning of a longer one
            stops += ["abca", "bc"]
        if (wrong := _stopped(parts, rng, text, stops)) is not None:
            return wrong
    for _ in range(6):
        if (wrong := _stopped(parts, rng, *nested(rng))) is not None:
            return wrong
    return None


def nested(rng: random.Random) -> tuple[str, list[str]]:
    """(text, stop strings): one ends within a longer one, and occurs once in the text, where the longer one begins.
    Behind it the longer one goes on, the text goes on otherwise, or it ends."""
    inner = "".join(rng.choice("bc") for _ in range(rng.randrange(1, 4)))
    begun = "a" * rng.randrange(1, 3) + inner
    before, behind = ("".join(rng.choice(" \n") for _ in range(rng.randrange(6))) for _ in range(2))
    stops = [begun + "d", inner]
    rng.shuffle(stops)
    return before + begun + rng.choice(("d" + behind, "e" + behind, "")), stops


def _stopped(parts: Parts, rng: random.Random, text: str, stops: list[str]) -> Wrong:
    """The text in drawn pieces through the product's matcher, against all places where a stop string is complete."""
    pieces, at = [], 0
    while at < len(text):
        step = rng.randrange(1, 5)
        pieces.append(text[at : at + step])
        at += step
    matcher = parts.keep("blink_core.frontend.stop:StopMatcher", stops)
    shown: list[str] = []
    matched = None
    for piece in pieces:
        shown.append(matcher.call("push", piece))
        matched = matcher.call("matched")
        if matched is not None:
            break
    shown.append("" if matched else matcher.call("finish"))
    ends = [(end, -len(stop)) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    end, length = min(ends, default=(len(text), 0))
    if "".join(shown) != text[: end + length] or (matched is not None) != bool(ends):
        return (
            "text before the stop string",
            f"{pieces} with {stops}: shown {''.join(shown)!r}, matched {matched!r}",
        )
    return None


PROMPTS = {
    "ids of a conversation": frozenset("T"),
    "ids of a text": frozenset("T"),
    "ids that end a text": frozenset("T"),
}
CONVERSATIONS: Sequence[list[dict[str, str]]] = (
    [{"role": "user", "content": "When did the lamp fail?"}],
    [
        {"role": "user", "content": "Count: 1907, 11"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "Zähle die Schiffe"},
    ],
)


def check_prompts(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """Prompt ids of chats and texts against transformers, stop ids of special tokens, and GGUF's pre-tokeniser."""
    for kind in ("byte-level", "with BOS"):
        folder = folders(scratch)[kind]
        text = rng.choice(SAMPLES) + f" {rng.randrange(10**6)}"
        hangs_on = [kind, TEMPLATE, (folder / "tokenizer.json").read_text(encoding="utf-8"), CONVERSATIONS, text]
        theirs = remembered("prompts", hangs_on, functools.partial(transformers_ids, folder, text))
        tokenizer = parts.keep(LOAD, folder)
        template = parts.keep(
            "blink_core.frontend.chat:ChatTemplate", tokenizer.call("chat_template"), tokenizer.call("special_tokens")
        )
        limits = parts.keep(
            "blink_core.frontend.engine_api:EngineLimits",
            max_model_len=300,
            vocab_size=512,
            max_prompt_len=299,
            slots=8,
        )
        preparer = parts.keep(
            "blink_core.frontend.prepare:Preparer",
            tokenizer,
            template,
            limits,
            served_name="m",
            eos_token_ids=(2,),
            max_choices=8,
        )

        def plan(path: str, preparer: Any = preparer, **body: Any) -> Any:
            raw = json.dumps({"model": "m", **body}).encode()
            return parts.keep("asyncio:run", preparer.keep(path, raw)).keep("plans.__getitem__", 0)

        for messages, expected in zip(CONVERSATIONS, theirs["chats"], strict=True):
            ids = plan("chat", messages=messages).call("prompt")
            if ids != expected:
                return "ids of a conversation", f"{kind}: {ids}, transformers gives {expected}"
        ids = plan("completion", prompt=text).call("prompt")
        if ids != theirs["text"]:
            return "ids of a text", f"{kind}: {text!r} gives {ids}, transformers {theirs['text']}"
        stop_id = rng.randrange(3, 500)
        ending = plan("completion", prompt=text, stop=["x", "<|im_start|>"], stop_token_ids=[stop_id])
        stops, hidden = ending.call("params.stop_token_ids"), ending.call("hidden")
        if set(stops) != {1, stop_id} or not {1, 2, stop_id} <= hidden:
            return "ids that end a text", f"{kind}: stop ids {stops}, hidden {sorted(hidden)}, special 1 and {stop_id}"
    return _gguf_digits(parts, rng)


def transformers_ids(folder: Path, text: str) -> dict[str, Any]:
    """Ids of `CONVERSATIONS` by the chat template, and of `text`."""
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    chats = [theirs.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in CONVERSATIONS]
    return {"chats": chats, "text": theirs(text)["input_ids"]}


def _gguf_digits(parts: Parts, rng: random.Random) -> Wrong:
    """Pre-tokenisers by llama.cpp's name: `smollm` cuts digits apart, `gpt-2` does not."""
    raw = json.loads((model_path("mistral-full") / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = dict(raw["model"]["vocab"])
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in raw["model"]["merges"]]
    digits = [str(a) + str(b) for a in range(10) for b in range(10)]
    for pair in digits:
        vocabulary.setdefault(pair, len(vocabulary))
    merges += [f"{pair[0]} {pair[1]}" for pair in digits if f"{pair[0]} {pair[1]}" not in merges]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    for name, apart in (("smollm", True), ("gpt-2", False)):
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
        }
        loaded = parts.keep("blink_core.frontend.tokenizer_gguf:tokenizer_from_metadata", metadata)
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(m.split(" ")) for m in merges]))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level] if apart else [byte_level]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        text = f"in {rng.randrange(1000, 9999)} the lamp, {rng.randrange(10**6)} ships\n\n12."
        ids, expected = loaded.call("encode", text), backend.encode(text).ids
        if ids != expected:
            return "ids of a text", f"GGUF {name}: {text!r} gives {ids}, expected {expected}"
    return None


_HERE = "verification.mutants.checkers.text."
CHECKERS: tuple[Checker, ...] = (
    DrawnChecker("detokeniser", frozenset({_HERE + "check_detokeniser"}), DETOKENISED, check_detokeniser),
    DrawnChecker("stop-strings", frozenset({_HERE + "check_stops"}), STOPS, check_stops),
    DrawnChecker("prompt-ids", frozenset({_HERE + "check_prompts"}), PROMPTS, check_prompts),
)
