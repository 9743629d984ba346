"""The tokenizer: byte-level BPE learnt from the generator's own text, and the chat template.

Every digit is a token, and so is every listed word with the space before it. Any text can be encoded:
what has no token of its own falls apart into bytes.

    python -m models.demo_training.vocabulary FOLDER     writes tokenizer.json and tokenizer_config.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.demo_training.tasks.arithmetic import sum_of
from models.demo_training.tasks.chatter import book
from models.demo_training.tasks.copying import copying
from models.demo_training.tasks.json_shapes import shaped
from models.demo_training.tasks.retrieve import plain_listing, varied_listing
from models.demo_training.tasks.words import ADJECTIVES, FIELDS, NAMES, NOUNS

BOS, END, SYSTEM, USER, ASSISTANT, PAD = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|pad|>",
)
VOCAB_SIZE = 2048
CONTEXT = 4096
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% elif message['role'] in ('system', 'developer') %}<|system|>"
    "{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SEED = 1
_SAMPLES = 1500
# Letters with the space before them, digits one by one, other marks one by one, runs of spaces.
_SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s+"


def build() -> Tokenizer:
    """Learns the merges from the data; the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _texts() -> Iterator[str]:
    """Listed words and small talk weigh as much as it takes for their words to become tokens."""
    words = [*NOUNS, *ADJECTIVES, *FIELDS, *NAMES]
    yield from (f" {word}" for word in words for _ in range(_SAMPLES))
    for asks, answer in book().topics:
        yield from (answer,) * 20
        yield from asks * 3
    yield from (book().beyond, *book().beyond_asks, *book().things, *book().kinds) * 3
    draw = random.Random(_SEED)
    for _ in range(_SAMPLES):
        for turn in (
            sum_of(draw), copying(draw), shaped(draw),
            *plain_listing(draw, 3).asked(draw), *varied_listing(draw, 3).asked(draw),
        ):  # fmt: skip
            yield turn.question
            yield turn.answer


def write(folder: Path) -> None:
    """Writes both files of the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(build().to_str())
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def main() -> int:
    """Writes the tokenizer and returns 0."""
    parser = argparse.ArgumentParser(description="Makes the demo model's tokenizer.")
    parser.add_argument("folder", type=Path, help="where tokenizer.json and tokenizer_config.json go")
    write(parser.parse_args().folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
