"""A model's folder for masks: a configuration and the byte tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from baton.engine.shared_memory.mask_board import Mask
from baton.model_spec.byte_tokenizer import byte_tokenizer_json
from baton.v1.types_pb2 import Grammar, Limits
from services.grammar.grammar_source import grammar_source
from services.grammar.matcher import GuidedSequence, Matchers

VOCAB_SIZE = 300
END_ID, OTHER_END_ID = 257, 290


def make_folder(folder: Path, **fields: object) -> Path:
    config = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "eos_token_id": [END_ID, OTHER_END_ID],
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_grammar(
    matchers: Matchers, grammar: Grammar, limits: Limits, output: Sequence[int]
) -> GuidedSequence:
    """Opens a sequence of a grammar that no other process has compiled."""
    return matchers.open(grammar_source(grammar), limits, output)


def make_matchers(folder: Path) -> Matchers:
    return Matchers.of_model(make_folder(folder))


_VOCABULARY = json.loads(byte_tokenizer_json())["model"]["vocab"]
# By byte, for the ASCII characters that stand for themselves.
ID_OF = {character: number for character, number in _VOCABULARY.items() if 0x21 <= ord(character) < 0x7F}
CHARACTER_OF = {number: character for character, number in ID_OF.items()}


_SPELLING = {number: character for character, number in _VOCABULARY.items()}


def _characters() -> list[str]:
    """The character that byte-level BPE writes each byte as."""
    spelt = {ord(character) for character in _VOCABULARY if ord(character) < 256}
    others = iter(sorted(character for character in _VOCABULARY if ord(character) >= 256))
    return [chr(byte) if byte in spelt else next(others) for byte in range(256)]


_CHARACTERS = _characters()


def ids_of(text: str) -> list[int]:
    return [ID_OF[character] for character in text]


def bytes_ids(text: str) -> list[int]:
    """The byte tokens of any text."""
    return [_VOCABULARY[character] for character in map(_CHARACTERS.__getitem__, text.encode())]


def text_of(ids: list[int]) -> str:
    """The text of byte tokens. Raises UnicodeDecodeError where it is not UTF-8."""
    written = {character: number for number, character in enumerate(_characters())}
    return bytes(written[_SPELLING[token]] for token in ids).decode()


def allowed(mask: Mask) -> set[int]:
    """The ids that a mask allows."""
    return {token for token in range(32 * len(mask)) if int(mask[token // 32]) >> token % 32 & 1}
