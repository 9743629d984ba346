"""Shapes of models by name, and what their numbers are kept in. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from baton.engine.kernels.weight_format import FORMATS
from baton.model_spec.layout import FP8, key_value_planes

_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats, named like a worker's options. `dtype`: as torch spells it, or bf16, fp16, fp32 or
    fp64. Raises ValueError where the head is to be quantised and nothing says how."""

    dtype: str
    quantization: str | None = None
    quantize_head: bool = False
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.quantize_head and self.quantization is None:
            raise ValueError("--quantize-head needs --quantization: it says how")

    @property
    def torch_dtype(self) -> str:
        """The dtype as torch spells it."""
        return _SPELLINGS.get(self.dtype, self.dtype)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that is not in fewer bits."""
        return _BYTES[self.torch_dtype]

    @property
    def cache_dtype(self) -> str:
        """The KV cache's dtype as layouts name it."""
        return FP8 if self.kv_dtype == "fp8" else self.torch_dtype

    def weight_bytes(self, n: int, k: int, *, head: bool = False) -> int:
        """Bytes of a layer's matrix of n rows of k elements, or of the head's."""
        if self.quantization is None or (head and not self.quantize_head):
            return n * k * self.element_bytes
        return FORMATS[self.quantization].nbytes(n, k)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's configuration, as in `config.json`."""

    config: dict[str, Any]

    def products(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each product's weights, by the names of `Product`; of experts those of one."""
        c = self.config
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        inner = c.get("moe_intermediate_size", c["intermediate_size"])
        queries, keys = heads * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        return {
            "qkv": (queries + 2 * keys, hidden),
            "output": (hidden, queries),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (c["vocab_size"], hidden),
        }

    @property
    def experts(self) -> int:
        """Experts of a layer; 0 where its MLP is dense."""
        return int(self.config.get("num_experts", self.config.get("num_local_experts", 0)))

    def experts_read(self, rows: float) -> float:
        """MLPs of a layer that a step of `rows` rows is expected to read, where each row draws its experts
        uniformly; 1 where the MLP is dense."""
        if not self.experts:
            return 1.0
        share = self.config["num_experts_per_tok"] / self.experts
        return float(self.experts * (1 - (1 - share) ** rows))

    def weight_elements(self) -> int:
        """Elements that a row is multiplied by: the weights of all products, of experts those that it takes
        (norms and the embedding's rows are negligible)."""
        c, sizes = self.config, {name: rows * columns for name, (rows, columns) in self.products().items()}
        head = sizes.pop("head")
        mlp = (sizes.pop("gate_up") + sizes.pop("down")) * int(c.get("num_experts_per_tok", 1))
        router = self.experts * int(c["hidden_size"])
        return int(c["num_hidden_layers"]) * (sum(sizes.values()) + mlp + router) + head

    def weight_bytes(self, precision: Precision, rows: float = math.inf) -> int:
        """Bytes of the weights that a step of `rows` rows reads; by default all but the embedding's."""
        c, sizes = self.config, self.products()
        head = precision.weight_bytes(*sizes.pop("head"), head=True)
        bytes_of = {name: precision.weight_bytes(*size) for name, size in sizes.items()}
        mlp = (bytes_of.pop("gate_up") + bytes_of.pop("down")) * self.experts_read(rows)
        router = self.experts * int(c["hidden_size"]) * precision.element_bytes
        return round(int(c["num_hidden_layers"]) * (sum(bytes_of.values()) + mlp + router)) + head

    def held_bytes(self, precision: Precision) -> int:
        """Bytes of all weights in memory: those that a step reads, and the embedding, unless the head is the
        same matrix."""
        c = self.config
        shared = c["tie_word_embeddings"] and not precision.quantize_head
        embedding = 0 if shared else int(c["vocab_size"] * c["hidden_size"]) * precision.element_bytes
        return self.weight_bytes(precision) + embedding

    def kv_elements_read(self, context: float) -> float:
        """Elements of keys and values that a step reads for a row of `context` tokens."""
        layers = int(self.config["num_hidden_layers"])
        window = self.config.get("sliding_window")
        of_all = layers // int(self.config.get("sliding_window_pattern", 1)) if window else layers
        tokens = of_all * context + (layers - of_all) * min(context, window or 0)
        return self.kv_elements() / layers * tokens

    def kv_elements(self) -> int:
        """Elements of keys and values of one token, all layers."""
        c = self.config
        return int(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"])

    def kv_element_bytes(self, precision: Precision) -> float:
        """Bytes of an element of keys and values in the cache, its share of a scale included."""
        head_dim = int(self.config["head_dim"])
        planes = key_value_planes(precision.cache_dtype, 1, head_dim)
        return sum(plane.token_bytes for plane in planes) / (2 * head_dim)


_BASE: dict[str, Any] = {
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "eos_token_id": 2,
}
_LLAMA = {
    **_BASE,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "eos_token_id": 128001,
}
_QWEN2 = {
    **_BASE,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
}
_QWEN3 = {
    **_BASE,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
_QWEN3_MOE = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
}
_MISTRAL = {
    **_BASE,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
}
_MIXTRAL = {**_MISTRAL, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
_GEMMA3 = {
    **_BASE,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}
_PHI3 = {
    **_BASE,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "rope_theta": 10000.0,
    "sliding_window": None,
}


def _shape(
    base: dict[str, Any],
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocab: int | None = None,
    **others: Any,
) -> Shape:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return Shape({**base, **sizes, **({} if vocab is None else {"vocab_size": vocab}), **others})


_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA31 = {**_LLAMA, "rope_scaling": {"factor": 8.0, **_LLAMA3_ROPE}}
_LLAMA32 = {**_LLAMA, "rope_scaling": {"factor": 32.0, **_LLAMA3_ROPE}, "tie_word_embeddings": True}
_TIED = {"tie_word_embeddings": True, "vocab_size": 151936}

# From the models' published configurations.
SHAPES = {
    "llama-3.1-8b": _shape(_LLAMA31, 32, 4096, 14336, 32, 8),
    "llama-3.1-70b": _shape(_LLAMA31, 80, 8192, 28672, 64, 8),
    "llama-3.2-1b": _shape(_LLAMA32, 16, 2048, 8192, 32, 8, head_dim=64),
    "llama-3.2-3b": _shape(_LLAMA32, 28, 3072, 8192, 24, 8),
    "qwen2.5-0.5b": _shape(_QWEN2, 24, 896, 4864, 14, 2, head_dim=64, **_TIED),
    "qwen2.5-1.5b": _shape(_QWEN2, 28, 1536, 8960, 12, 2, **_TIED),
    "qwen2.5-3b": _shape(_QWEN2, 36, 2048, 11008, 16, 2, **_TIED),
    "qwen2.5-7b": _shape(_QWEN2, 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _shape(_QWEN2, 48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": _shape(_QWEN2, 64, 5120, 27648, 40, 8, 152064),
    "qwen3-0.6b": _shape(_QWEN3, 28, 1024, 3072, 16, 8, tie_word_embeddings=True),
    "qwen3-1.7b": _shape(_QWEN3, 28, 2048, 6144, 16, 8, tie_word_embeddings=True),
    "qwen3-4b": _shape(_QWEN3, 36, 2560, 9728, 32, 8, tie_word_embeddings=True),
    "qwen3-8b": _shape(_QWEN3, 36, 4096, 12288, 32, 8),
    "qwen3-14b": _shape(_QWEN3, 40, 5120, 17408, 40, 8),
    "qwen3-32b": _shape(_QWEN3, 64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _shape(
        _QWEN3_MOE, 48, 2048, 6144, 32, 4, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    ),
    "mixtral-8x7b": _shape(
        _MIXTRAL, 32, 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "mistral-7b": _shape(_MISTRAL, 32, 4096, 14336, 32, 8, 32768),
    "mistral-nemo": _shape(_MISTRAL, 40, 5120, 14336, 32, 8, 131072, max_position_embeddings=131072),
    "mistral-small": _shape(_MISTRAL, 40, 5120, 32768, 32, 8, 131072, rope_theta=100_000_000.0),
    "gemma-3-1b": _shape(_GEMMA3, 26, 1152, 6912, 4, 1, 262144, sliding_window=512),
    "gemma-3-4b": _shape(_GEMMA3, 34, 2560, 10240, 8, 4, sliding_window=1024),
    "gemma-3-12b": _shape(_GEMMA3, 48, 3840, 15360, 16, 8, sliding_window=1024),
    "gemma-3-27b": _shape(
        _GEMMA3, 62, 5376, 21504, 32, 16, sliding_window=1024, head_dim=128, query_pre_attn_scalar=168
    ),
    "phi-3-mini": _shape(_PHI3, 32, 3072, 8192, 32, 32, 32064, head_dim=96, max_position_embeddings=4096),
    "phi-4-mini": _shape(
        _PHI3, 32, 3072, 8192, 24, 8, 200064, partial_rotary_factor=0.75, tie_word_embeddings=True
    ),
    "phi-4": _shape(_PHI3, 40, 5120, 17920, 40, 10, 100352, max_position_embeddings=16384),
    "tiny": _shape(_LLAMA, 2, 64, 128, 4, 2, 256, head_dim=16, max_position_embeddings=2048, eos_token_id=1),
}


def with_positions(shape: Shape, tokens: int) -> Shape:
    """The shape with another maximum context length."""
    most = max(tokens, int(shape.config["max_position_embeddings"]))
    return Shape({**shape.config, "max_position_embeddings": most})
