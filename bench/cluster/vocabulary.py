"""A tokenizer of any size for models with random weights: bytes, and words, numbers and punctuation at
random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from pathlib import Path

from baton.byte_tokenizer import BYTES, byte_tokenizer_json
from baton.model_files import TOKENIZER_FILE

_LETTERS = "eeeetttaaoooiinnsshhrrddlucmwfgypbvk"
_PUNCTUATION = '{}[]":,;()_-.<>/=+*'
_BLANK = "Ġ"  # as byte-level BPE writes it


def write_tokenizer(folder: Path, vocab_size: int, special: Collection[int], seed: int = 0) -> None:
    """Writes tokenizer.json with `vocab_size` tokens, of which `special` (ids from 256 on) have no text.
    About as many begin with a blank, are numbers, or punctuation, as in the vocabularies of models."""
    draw = random.Random(seed)
    document = json.loads(byte_tokenizer_json())
    vocabulary: dict[str, int] = document["model"]["vocab"]
    for token in range(BYTES, vocab_size):
        if token in special:
            vocabulary[f"<|{token}|>"] = token
            continue
        while (text := _text(draw)) in vocabulary:
            pass
        vocabulary[text] = token
    document["added_tokens"] = [
        {
            "id": token,
            "content": f"<|{token}|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in sorted(special)
    ]
    (folder / TOKENIZER_FILE).write_text(json.dumps(document))


def _text(draw: random.Random) -> str:
    kinds: tuple[tuple[float, Callable[[random.Random], str]], ...] = (
        (0.50, lambda one: _BLANK + _word(one)),
        (0.85, _word),
        (0.93, lambda one: _word(one).capitalize()),
        (0.95, lambda one: "".join(one.choices("0123456789", k=one.randint(2, 3)))),
        (0.98, lambda one: "".join(one.choices(_PUNCTUATION, k=one.randint(2, 4)))),
        (1.00, lambda one: _BLANK * one.randint(2, 64) + "".join(one.choices(_PUNCTUATION, k=2))),
    )
    at = draw.random()
    return next(make for until, make in kinds if at <= until)(draw)


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(_LETTERS, k=draw.randint(2, 12)))
