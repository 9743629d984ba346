"""Folders of models with random weights: a configuration, and a tokenizer of the size that is wanted.

Four kinds: the smallest, which fake engines and fake workers serve; a known shape (`bench.shapes`); and two
tokenizers for it, a vocabulary like a model's, and one word a token.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from baton.model_spec.byte_tokenizer import BYTES, byte_tokenizer_json
from baton.model_spec.model_files import TOKENIZER_FILE
from bench.shapes import SHAPES, with_positions

VOCAB = 4096
CONTEXT = 4096
_TOKEN_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_LETTERS = "eeeetttaaoooiinnsshhrrddlucmwfgypbvk"
_PUNCTUATION = '{}[]":,;()_-.<>/=+*'
# Letters of a word, and how many of a hundred words have so many.
_LENGTHS = {1: 1, 2: 4, 3: 9, 4: 14, 5: 16, 6: 16, 7: 13, 8: 10, 9: 7, 10: 5, 11: 3, 12: 2}
_MOST_ADDED = 2
_BLANK = "Ġ"  # as byte-level BPE writes it
# Words by their length.
Words = dict[int, list[str]]


def write_fake_model(folder: Path, context: int = CONTEXT, kv_heads: int = 1, head_dim: int = 2) -> Path:
    """Writes a configuration, by default with the smallest possible cache, and a tokenizer with two letters
    per token. A token's KV has 8 bytes per head and dimension.
    """
    from tokenizers import Tokenizer, decoders, models

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2, "head_dim": head_dim,
        "intermediate_size": 2, "num_attention_heads": kv_heads, "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1, "vocab_size": VOCAB, "max_position_embeddings": context, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = [a + b + c for a in _TOKEN_LETTERS for b in _TOKEN_LETTERS for c in "xy"][:VOCAB]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_random_model(folder: Path, shape: str, tokens: int) -> Path:
    """Writes a folder for `--weights random`: a configuration for sequences of up to `tokens`."""
    config = with_positions(SHAPES[shape], tokens).config
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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


def write_word_tokenizer(model: Path) -> None:
    """Writes a tokenizer beside the model's config.json, for all of its vocabulary: token i is the word `wi`,
    for every server the same."""
    config = json.loads((model / "config.json").read_text())
    vocabulary = {f"w{token}": token for token in range(config["vocab_size"])}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    (model / "tokenizer.json").write_text(json.dumps(document))
    settings: dict[str, str] = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    ends = config.get("eos_token_id")
    if isinstance(ends, int):
        settings["eos_token"] = f"w{ends}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
