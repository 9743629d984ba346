"""A tokenizer of any size for models with random weights: bytes, and words, numbers and punctuation at
random."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

from baton.model_spec.byte_tokenizer import BYTES, byte_tokenizer_json
from baton.model_spec.model_files import TOKENIZER_FILE

_LETTERS = "eeeetttaaoooiinnsshhrrddlucmwfgypbvk"
_PUNCTUATION = '{}[]":,;()_-.<>/=+*'
# Letters of a word, and how many of a hundred words have so many.
_LENGTHS = {1: 1, 2: 4, 3: 9, 4: 14, 5: 16, 6: 16, 7: 13, 8: 10, 9: 7, 10: 5, 11: 3, 12: 2}
_MOST_ADDED = 2
_BLANK = "Ġ"  # as byte-level BPE writes it


Words = dict[int, list[str]]
"""Words by their length."""


def write_tokenizer(folder: Path, vocab_size: int, special: Collection[int], seed: int = 0) -> None:
    """Writes tokenizer.json with `vocab_size` tokens, of which `special` (ids from 256 on) have no text.

    About as many begin with a blank, are numbers, or punctuation, as in the vocabularies of models. Most
    words continue another, as merges do: 128,000 tokens have 240,000 different prefixes, those of Mistral's
    Tekken 261,000. The mask of a grammar takes as long, since the library walks the tree of prefixes.
    """
    draw = random.Random(seed)
    document = json.loads(byte_tokenizer_json())
    vocabulary: dict[str, int] = document["model"]["vocab"]
    words: Words = defaultdict(list)
    for token in range(BYTES, vocab_size):
        if token in special:
            vocabulary[f"<|{token}|>"] = token
            continue
        while (text := _text(draw, words)) in vocabulary:
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


def _text(draw: random.Random, words: Words) -> str:
    kinds: tuple[tuple[float, Callable[[], str]], ...] = (
        (0.50, lambda: _BLANK + _word(draw, words)),
        (0.85, lambda: _word(draw, words)),
        (0.93, lambda: _word(draw, words).capitalize()),
        (0.95, lambda: "".join(draw.choices("0123456789", k=draw.randint(2, 3)))),
        (0.98, lambda: "".join(draw.choices(_PUNCTUATION, k=draw.randint(2, 4)))),
        (1.00, lambda: _BLANK * draw.randint(2, 64) + "".join(draw.choices(_PUNCTUATION, k=2))),
    )
    at = draw.random()
    return next(make for until, make in kinds if at <= until)()


def _word(draw: random.Random, words: Words) -> str:
    """Another word and some letters; `words` grows by it."""
    (length,) = draw.choices(list(_LENGTHS), list(_LENGTHS.values()))
    kept = max(0, length - draw.randint(1, _MOST_ADDED))
    begin = draw.choice(words[kept]) if words[kept] else _letters(draw, kept)
    word = begin + _letters(draw, length - kept)
    words[length].append(word)
    return word


def _letters(draw: random.Random, count: int) -> str:
    return "".join(draw.choices(_LETTERS, k=count))
