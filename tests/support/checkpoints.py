"""Small random checkpoints of every model family, written with transformers, tokenizer included."""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import string
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging as transformers_logging

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
}
VOCAB_SIZE = 320
BEGIN_ID, END_ID, USER_ID, ASSISTANT_ID = 256, 257, 258, 259
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{{ '<|user|>' if message['role'] == 'user' else '<|assistant|>' }}"
    "{{ message['content'] }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
}


@dataclass(frozen=True)
class Case:
    """A named model to test: family and what differs from the common small shape."""

    name: str
    family: str
    overrides: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path, **options: Any) -> Path:
        return make_checkpoint(folder, self.family, **{**self.overrides, **options})

    def __str__(self) -> str:
        return self.name


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_PHI3 = {"pad_token_id": 0, "original_max_position_embeddings": 2048}
# For heads of 16 dimensions, all of them rotated but 4.
LONGROPE: dict[str, Any] = {
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 2048,
    "attention_factor": 1.2,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 9.0, 16.0],
}
FAMILIES = [
    Case("llama-default", "llama", {"hidden_size": 128, "num_hidden_layers": 3}),
    Case("llama-linear", "llama", _rope("linear", factor=4.0)),
    Case("llama-llama3", "llama", _rope("llama3", **_LLAMA3)),
    Case("llama-yarn", "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=512)),
    Case(
        "llama-tied-biases", "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    Case(
        "llama-3-kv-heads", "llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    ),
    Case(
        "llama-head-dim-80", "llama", {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1}
    ),
    Case("mistral-window", "mistral", {"sliding_window": 16, "head_dim": 24}),
    Case("qwen2-biases", "qwen2", {}),
    Case(
        "qwen2-mixed-windows",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    Case("qwen3-norms", "qwen3", {"head_dim": 48}),
    Case("qwen3-tied", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    Case(
        "gemma3-windows",
        "gemma3",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case(
        "gemma3-linear-untied",
        "gemma3",
        {
            "head_dim": 16,
            "tie_word_embeddings": False,
            "sliding_window": 512,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            },
        },
    ),
    Case(
        "gemma3-biases",
        "gemma3",
        {"head_dim": 32, "attention_bias": True, "num_key_value_heads": 4, "sliding_window": 100},
    ),
    Case("phi3-partial", "phi3", {**_PHI3, **_rope("default", partial_rotary_factor=0.75)}),
    Case("phi3-longrope", "phi3", {**_PHI3, **_rope("longrope", **LONGROPE)}),
    Case(
        "phi3-window-tied",
        "phi3",
        {
            **_PHI3,
            **_rope("default", partial_rotary_factor=0.5),
            "sliding_window": 16,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
    ),
]


def _mixture(count: int, top_k: int, inner: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": inner}
    return {**sizes, "norm_topk_prob": True, **more}


# Mixtures of experts, which the reference alone computes.
MIXTURES = [
    Case("qwen3-moe-5-of-1", "qwen3_moe", _mixture(5, 1, 24, norm_topk_prob=False, head_dim=24)),
    Case("qwen3-moe-8-of-8", "qwen3_moe", _mixture(8, 8, 20, attention_bias=True)),
    Case(
        "qwen3-moe-60-of-4",
        "qwen3_moe",
        _mixture(60, 4, 36, num_hidden_layers=3, mlp_only_layers=[1], tie_word_embeddings=True),
    ),
    Case(
        "qwen3-moe-sparse-steps",
        "qwen3_moe",
        _mixture(8, 2, 48, num_hidden_layers=4, decoder_sparse_step=2, norm_topk_prob=False),
    ),
    Case("mixtral-8-of-2", "mixtral", {"num_local_experts": 8, "sliding_window": 16}),
    Case("mixtral-5-of-4", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 4}),
]


def make_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    sharded: bool = False,
    **shape: Any,
) -> Path:
    """Writes config, weights and tokenizer of a random model into `folder`, and returns it.

    `shape` overrides keys of the family's configuration class; `sharded` cuts the weights into several files.
    What a process has made once is copied.
    """
    text = json.dumps([family, seed, dtype, sharded, shape], sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    for file in _made(text).iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


@functools.cache
def _made(text: str) -> Path:
    """A folder of this process with the checkpoint that `text` describes, JSON of what differs."""
    family, seed, dtype, sharded, shape = json.loads(text)
    transformers_logging.disable_progress_bar()
    config = CONFIGS[family](**{**_SHAPE, **shape})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    _randomise(model, seed)
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    write_tokenizer(folder, config.vocab_size)
    return folder


@functools.cache
def _folder() -> str:
    """The folder of all of them, which goes with the process."""
    folder = tempfile.mkdtemp(prefix="checkpoints-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _randomise(model: Any, seed: int) -> None:
    """Every parameter random, biases and norms too; matrices with a gain at which greedy text varies."""
    generator = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type == "gemma3_text"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("norm.weight"):
                noise = 0.2 * noise + _mean_of_norm(name, gemma=gemma)
            elif name.endswith(".bias"):
                noise = 0.3 * noise
            else:
                gain = 3 if parameter.ndim == 3 else 2  # of experts, which are stacked
                noise = gain * noise / math.sqrt(parameter.shape[-1])
                if gemma and "embed_tokens" in name:
                    noise = noise / 4
            parameter.copy_(noise)


def _mean_of_norm(name: str, *, gemma: bool) -> float:
    """The mean of a stored gain. Gemma stores gains less 1; here they are large where greedy text needs it:
    sharper attention, and a residual stream in which the embedding is a small part."""
    if not gemma:
        return 1.0
    large = {"post_": 3.0, "self_attn": 3.0, "model.norm": 3.0}
    return next((mean for part, mean in large.items() if part in name), 0.0)


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level tokenizer of exactly `vocab_size` ids: 256 bytes, 4 special tokens, pairs of letters."""
    vocab = {
        character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    first_pair = len(vocab) + len(SPECIAL_TOKENS)
    vocab |= {token: len(vocab) + number for number, token in enumerate(SPECIAL_TOKENS)}
    merges = pairs[:: max(1, len(pairs) // max(1, vocab_size - first_pair))][: vocab_size - first_pair]
    vocab |= {a + b: first_pair + number for number, (a, b) in enumerate(merges)}
    if len(vocab) != vocab_size:
        raise ValueError(f"vocabulary of {vocab_size} ids cannot be made, only of {len(vocab)}")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
