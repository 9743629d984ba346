"""The model as it is trained: Llama's architecture in plain torch, with transformers' names of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network; `head_dim` times `heads` need not be `hidden`."""

    vocab: int = 2048
    hidden: int = 256
    intermediate: int = 768
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    context: int = 4096
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-5


class Llama(nn.Module):
    """Token ids `(batch, tokens)` to hidden states; the embedding is the head, too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Draws weights by torch's current seed; what writes to the stream begins at zero."""
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            else:
                deviation = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                weight.normal_(0.0, deviation)

    def forward(self, ids: Tensor) -> Tensor:
        """Computes logits `(batch, tokens, vocab)` from ids `(batch, tokens)`."""
        return F.linear(self.model(ids), self.model.embed_tokens.weight)

    def losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of each target in nats, `(batch, tokens)`, float32."""
        logits = self(ids)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(ids)


class _Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self.register_buffer("frequencies", shape.rope_theta**-exponents, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angles = torch.outer(positions, self.get_buffer("frequencies")).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return torch.as_tensor(self.norm(x))


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = _Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return torch.as_tensor(x + self.mlp(self.post_attention_layernorm(x)))


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.as_tensor(self.o_proj(heads.transpose(1, 2).flatten(2)))


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `(batch, heads, tokens, dim)`, the halves of a head being the pairs."""
    first, second = x.float().chunk(2, dim=-1)
    turned = x.float() * cos + torch.cat((-second, first), dim=-1) * sin
    return turned.to(x.dtype)
