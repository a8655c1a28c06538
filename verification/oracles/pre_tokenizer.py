"""Mends the pre-tokeniser of a tokeniser that transformers read from a GGUF file.

GGUF names the pre-tokeniser in `tokenizer.ggml.pre`. transformers (5.24) ignores that key and splits as GPT-2 does.
For "smollm" llama.cpp's table, and the model's own tokenizer.json, split digits one by one before that, so ids of text
such as "\\n\\n1." would differ from what the model was trained on. A name that needs no change, or that is unknown
here, is left as transformers has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from verification.oracles.gguf_decode import read_header

DIGITS_FIRST = ("smollm",)


def mend_pre_tokenizer(tokenizer: Any, path: Path) -> None:
    """Sets the pre-tokeniser that the GGUF file at `path` names, where transformers gets it wrong."""
    if read_header(path).metadata.get("tokenizer.ggml.pre") in DIGITS_FIRST:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
