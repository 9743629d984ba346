"""The tokenizer of models without one: every byte is a token, with ids 0 to 255; others have no text."""

from __future__ import annotations

import json

BYTES = 256
# Bytes that stand for the character of their own number in byte-level BPE; the others follow from 256 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_tokenizer_json(vocab_size: int = BYTES) -> str:
    """Content of its tokenizer.json. Ids are in the order of the characters that byte-level BPE (GPT-2)
    writes bytes as. Ids from 256 up to `vocab_size` are special tokens."""
    others = BYTES - len(_PRINTABLE)
    characters = sorted([*map(chr, _PRINTABLE), *(chr(256 + number) for number in range(others))])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {f"<|{token}|>": token for token in range(BYTES, vocab_size)}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": token,
                    "content": content,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for content, token in special.items()
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {character: number for number, character in enumerate(characters)} | special,
                "merges": [],
            },
        }
    )
