"""Model shapes by name. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's configuration, as in `config.json`."""

    config: dict[str, Any]

    def products(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each product's weights, by the names in `baton.engine.forward.gemm`."""
        c = self.config
        hidden, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
        queries, keys = heads * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        return {
            "qkv": (queries + 2 * keys, hidden),
            "output": (hidden, queries),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (c["vocab_size"], hidden),
        }

    def weight_elements(self) -> int:
        """Elements that a decode step reads: the weights of all products (norms and the embedding's rows are
        negligible)."""
        sizes = {name: rows * columns for name, (rows, columns) in self.products().items()}
        head = sizes.pop("head")
        return int(self.config["num_hidden_layers"]) * sum(sizes.values()) + head

    def held_elements(self) -> int:
        """Elements of all weights in memory: those that a step reads, and the embedding."""
        c = self.config
        embedding = 0 if c["tie_word_embeddings"] else c["vocab_size"] * c["hidden_size"]
        return self.weight_elements() + int(embedding)

    def kv_elements(self) -> int:
        """Elements of keys and values of one token, all layers."""
        c = self.config
        return int(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"])


def _llama(**overrides: Any) -> Shape:
    base: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "eos_token_id": 128001,
    }
    return Shape({**base, **overrides})


SHAPES = {
    "llama-3.1-8b": _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=32,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    ),
    "tiny": _llama(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        head_dim=16,
        vocab_size=256,
        max_position_embeddings=2048,
        eos_token_id=1,
    ),
}


def with_positions(shape: Shape, tokens: int) -> Shape:
    """The shape with another maximum context length."""
    most = max(tokens, int(shape.config["max_position_embeddings"]))
    return Shape({**shape.config, "max_position_embeddings": most})


def torch_dtype(name: str) -> str:
    """Maps bf16, fp16, fp32, fp64 or torch's own spelling to torch's dtype."""
    return _DTYPES.get(name, name)
