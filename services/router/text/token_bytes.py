"""Bounds the bytes of text that one token can stand for: a text that cannot fit the context is not
tokenised."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

# Composition (NFC) writes at most three bytes for nine (a Hangul syllable for its letters).
_COMPOSED = 3


def longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """The most bytes of a text that become one token; None where no bound is known: where text may be dropped
    or written otherwise before it is cut into tokens, or unknown characters become one token."""
    described: dict[str, Any] = json.loads(tokenizer.to_str())
    model = described["model"]
    shrinks = _shrinks(described.get("normalizer"))
    if shrinks is None or model.get("type") != "BPE" or model.get("unk_token") is not None:
        return None
    if not _is_byte_level(described.get("pre_tokenizer")):
        return None
    added = described.get("added_tokens") or ()
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # swallows any amount of white space
    # A byte-level vocabulary spells each byte as one character.
    longest = max(map(len, model["vocab"]), default=1)
    return shrinks * max(longest, *(len(token["content"].encode()) for token in added), 1)


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """Factor by which the normaliser may shorten a text; None: unknown."""
    if normalizer is None:
        return 1
    return _COMPOSED if normalizer.get("type") == "NFC" else None


def _is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    """True if the text is cut, whole, and then spelt byte by byte."""
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    *cuts, last = steps
    kept = all(step["type"] in ("Split", "Digits") and step.get("behavior") != "Removed" for step in cuts)
    return kept and last["type"] == "ByteLevel"
