"""One decode step's forward pass by the GPU kernels: a fixed list of launches for a fixed number of rows.

Everything lives in buffers made once, so that the launches can be captured: tokens and positions of the
rows in, logits out. Rows without a sequence compute what nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.forward.gemm import EPILOGUES, Choice, Scratch, run_product, space_needed
from baton.engine.forward.gemm_table import ProductTable
from baton.engine.kernels.gpu.attention.items import AttentionTuning, Heads, Items
from baton.engine.kernels.gpu.attention.split_attention import split_attention
from baton.engine.kernels.gpu.gemm.gemv import Norm
from baton.engine.kernels.gpu.step.row_ops import embed
from baton.engine.kernels.reference.split_plan import SplitPolicy
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.reference import Decoder, Layer, Linear


@dataclass(frozen=True, slots=True)
class PassOptions:
    """How the kernels are cut; `attention` None: by the rows, as measured on an H100."""

    table: ProductTable
    policy: SplitPolicy = field(default_factory=SplitPolicy)
    attention: AttentionTuning | None = None


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What the step tells the pass of each row, all int32 [R]: its slot, token and position; and, a cache
    group, the attention's items."""

    slot: Tensor
    token: Tensor
    position: Tensor
    items: tuple[Items, ...]


class DecodePass:
    """Buffers for up to `rows` rows, and the launches that fill them."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        block_tables: tuple[Tensor, ...],
        rows: int,
        options: PassOptions,
    ) -> None:
        self.rows = rows
        self.options = options
        self._decoder = decoder
        self._cache = cache
        self._tables = block_tables
        config = decoder.config
        device, dtype = decoder.device, decoder.dtype

        def buffer(width: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=kind, device=device)

        query_width = config.num_heads * config.head_dim
        self._hidden = buffer(config.hidden_size)
        self._qkv = buffer(query_width + 2 * config.num_kv_heads * config.head_dim)
        self._attended = buffer(query_width)
        self._inner = buffer(config.intermediate_size)
        self._rotary = (
            buffer(config.head_dim // 2, torch.float32),
            buffer(config.head_dim // 2, torch.float32),
        )
        self.logits = buffer(config.vocab_size)
        self._scratch = Scratch.empty(
            rows, config.hidden_size, config.intermediate_size, self._space(), device, dtype
        )
        policy, group_tokens = options.policy, [_pool_tokens(group) for group in cache.groups]

        def ints() -> Tensor:
            return torch.zeros(rows, dtype=torch.int32, device=device)

        shape = config.num_heads, config.num_kv_heads, config.head_dim
        items = [
            Items.empty(rows, policy.most_items(rows, tokens), *shape, device) for tokens in group_tokens
        ]
        self.inputs = RowInputs(ints(), ints(), ints(), tuple(items))
        self._heads = [
            Heads(
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.attention_scale,
                config.rms_norm_eps,
                group.window,
            )
            for group in decoder.layout.groups
        ]
        self._group_tokens = group_tokens

    def choice(self, product: str, linear: Linear, rows: int) -> Choice:
        n, k = linear.weight.shape
        return self.options.table.choice((product, rows, n, k, _name(self._decoder.dtype)))

    def most_items(self, group: int, rows: int) -> int:
        """Items that a step of `rows` rows may have."""
        return self.options.policy.most_items(rows, self._group_tokens[group])

    def run(self, rows: int) -> Tensor:
        """Launches the pass over the first `rows` rows → logits [rows, vocab], a view of a buffer."""
        decoder, eps = self._decoder, self._decoder.config.rms_norm_eps
        hidden = self._hidden[:rows]
        rotary = self._rotary[0][:rows], self._rotary[1][:rows]
        embed(
            hidden, rotary, self.inputs.token, self.inputs.position,
            decoder.embedding, decoder.rope.frequencies, decoder.rope.scale,
        )  # fmt: skip
        for layer in decoder.layers:
            self._product("qkv", self._qkv[:rows], hidden, layer.qkv, Norm(layer.attention_norm, eps))
            self._attention(layer, rows, rotary)
            self._product("output", hidden, self._attended[:rows], layer.output)
            self._product("gate_up", self._inner[:rows], hidden, layer.gate_up, Norm(layer.mlp_norm, eps))
            self._product("down", hidden, self._inner[:rows], layer.down)
        logits = self.logits[:rows]
        self._product("head", logits, hidden, Linear(decoder.head, None), Norm(decoder.norm, eps))
        return logits

    def _attention(self, layer: Layer, rows: int, rotary: tuple[Tensor, Tensor]) -> None:
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        group = layer.group
        split_attention(
            self._attended[:rows],
            self._qkv[:rows],
            self._cache.groups[group],
            layer.index,
            self._tables[group],
            rotary,
            self.inputs.items[group],
            self._heads[group],
            norms,
            self.options.attention or AttentionTuning.for_rows(rows),
            self.most_items(group, rows),
        )

    def _product(self, name: str, out: Tensor, x: Tensor, linear: Linear, norm: Norm | None = None) -> None:
        rows = out.shape[0]
        choice = self.choice(name, linear, rows)
        run_product(out, x, linear, EPILOGUES[name], norm, choice, self._scratch)

    def _space(self) -> tuple[int, int]:
        """The largest need of any product at any bucket up to `rows`."""
        layer = self._decoder.layers[0]
        linears = {
            "qkv": layer.qkv,
            "output": layer.output,
            "gate_up": layer.gate_up,
            "down": layer.down,
            "head": Linear(self._decoder.head, None),
        }
        needs = [
            space_needed(rows, linear.weight.shape[0], name, self.choice(name, linear, rows))
            for name, linear in linears.items()
            for rows in buckets_up_to(self.rows)
        ]
        return max(need[0] for need in needs), max(need[1] for need in needs)


def buckets_up_to(rows: int) -> list[int]:
    """Batch sizes that have a graph of their own: powers of two with halves between, and `rows` itself."""
    steps = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    while steps[-1] < rows:
        steps.append(steps[-1] * 2)
    return [step for step in steps if step < rows] + [rows]


def _pool_tokens(group: Tensor) -> int:
    return group.shape[0] * group.shape[4]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
