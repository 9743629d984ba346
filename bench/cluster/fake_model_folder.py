"""The folder of a model that fake engines and fake workers serve."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 4096
CONTEXT = 4096
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def write_model(folder: Path, context: int = CONTEXT, kv_heads: int = 1, head_dim: int = 2) -> Path:
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
    words = [a + b + c for a in _LETTERS for b in _LETTERS for c in "xy"][:VOCAB]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
