"""A tokenizer for models with random weights, the same for every server: token i is the word `wi`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_word_tokenizer(model: Path) -> None:
    """Writes it beside the model's config.json, for all of its vocabulary."""
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
