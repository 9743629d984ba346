"""The buffers that a forward pass keeps its activations in; made once, so that launches can be captured."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from baton.engine.forward.layers.experts import ExpertsSpace
from baton.engine.model.layers.mlp import DenseMlp
from baton.engine.model.modules import Model


class Workspace:
    """Activations of up to R rows.

    `hidden` [R, hidden]: the residual stream. `qkv` [R, (heads + 2 kv heads) · dim] and `attn_out` [R, heads
    · dim] may have further rows behind them. `inner` [R, inner width of the widest dense MLP]. `experts`:
    what mixtures need; None for a model without any.
    """

    def __init__(
        self, model: Model, rows: int, *, more_qkv: int = 0, more_attn_out: int = 0, exact: bool = False
    ) -> None:
        """All zeros. `more_qkv`, `more_attn_out`: rows of these buffers beyond `rows`. `exact`: of
        `ExpertsSpace.of`."""
        config = model.config

        def buffer(width: int, rows: int = rows, dtype: torch.dtype = model.precision.activations) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=model.device)

        query_width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        half = config.head_dim // 2
        self.hidden = buffer(config.hidden_size)
        self.qkv = buffer(query_width + 2 * key_width, rows + more_qkv)
        self.attn_out = buffer(query_width, rows + more_attn_out)
        dense = [each.mlp.inner_width for each in model.layers if isinstance(each.mlp, DenseMlp)]
        self.inner = buffer(max(dense, default=0))
        self.experts = ExpertsSpace.of(model, rows, exact=exact)
        self._rotary = [
            (buffer(half, dtype=torch.float32), buffer(half, dtype=torch.float32)) for _ in model.ropes
        ]

    def rotary(self, rows: int, rope: int) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, dim / 2] float32 by the model's rotary embedding of that number."""
        cos, sin = self._rotary[rope]
        return cos[:rows], sin[:rows]

    def behind(self, first: int) -> Workspace:
        """The rows from `first` on as a workspace of their own, in the same memory."""
        rows = copy(self)
        rows.hidden, rows.qkv = self.hidden[first:], self.qkv[first:]
        rows.attn_out, rows.inner = self.attn_out[first:], self.inner[first:]
        rows.experts = self.experts and self.experts.behind(first)
        rows._rotary = [(cos[first:], sin[first:]) for cos, sin in self._rotary]
        return rows

    def operands(self, product: str, rows: int) -> tuple[Tensor, Tensor]:
        """Output and input of a layer's product by name, for `rows` rows; KeyError for any other name."""
        output, x = {
            "qkv": (self.qkv, self.hidden),
            "output": (self.hidden, self.attn_out),
            "gate_up": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }[product]
        return output[:rows], x[:rows]
