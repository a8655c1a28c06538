"""A small byte-level BPE tokeniser with a chat template, so that a tiny model can be served over HTTP, offline.

Byte-level: every string has an encoding, and a random model emits broken UTF-8, which is what incremental
detokenisation must survive. Ids 0, 1 and 2 are the special tokens.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Enough distinct words for the merges of a vocabulary of 512, with some text beyond ASCII.
_TEXT = """
A lighthouse keeper counts the ships that pass before the storm reaches the harbour. Every evening the lamp is lit,
the lens is cleaned, the weather is written into the log book, and the wind is measured from the north window.
The first rule of the station: never leave the light unattended; the second rule: write down what was observed and not
what was expected. When the generator failed in 1907 the keeper turned the mechanism by hand for eleven hours.
Requests arrive in a queue, are admitted in order, and receive their tokens one after another until the stream ends.
Question: which numbers between ten and thirty are prime? Answer: 11, 13, 17, 19, 23 and 29. def add(left, right):
    return left + right
for index in range(10): print(index, "squared is", index * index)
Der Leuchtturmwärter zählt die Schiffe, die vor dem Sturm vorüberfahren. Le gardien écrit chaque soir dans le journal.
日本語の文章も少しだけ含まれています。 Русский текст тоже есть. Emoji: 🙂🚀.
system user assistant message content instruction helpful story question answer translate summarise explain describe
"""


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE with exactly ``vocab_size`` entries. ``ValueError`` if the built-in text cannot give so many."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"the built-in text gives a vocabulary of {size}, not {vocab_size}")
    return tokenizer


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat template as transformers saves them."""
    end, start, stop = SPECIAL_TOKENS
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(vocab_size),
        bos_token=start,
        eos_token=stop,
        pad_token=stop,
        unk_token=end,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
