"""One decode step's forward pass by the GPU kernels: a fixed list of launches for a fixed number of rows.

Everything lives in buffers made once, so that the launches can be captured: tokens and positions of the
rows in, logits out. Results of rows without a sequence are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.forward.layer_program import attention_heads, embed_rows, run_layers
from baton.engine.forward.layers.linear import Gemm
from baton.engine.forward.workspace import Workspace
from baton.engine.gemm_dispatch.choice import ProductKey
from baton.engine.gemm_dispatch.table import ProductTable
from baton.engine.kernels.gpu.attention.items import AttentionTuning, Items, SplitPolicy
from baton.engine.kernels.gpu.attention.split_attention import split_attention
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.layers.attention import Attention
from baton.engine.model.modules import Model
from baton.engine.plan.decode_rows import batches_up_to
from baton.engine.random_tokens import random_tokens

# Tokens of a part of a row's context in mode `exact`.
_EXACT_PART = 512


@dataclass(frozen=True, slots=True)
class PassOptions:
    """How the kernels are cut. `policy` and `attention`: those of any number of rows; None: by rows, heads,
    the cache's format and `multiprocessors`."""

    table: ProductTable
    policy: SplitPolicy | None = field(default_factory=SplitPolicy)
    multiprocessors: int = 132
    attention: AttentionTuning | None = None

    @classmethod
    def of(cls, model: Model, *, exact: bool) -> PassOptions:
        """Options for this model's GPU and mode."""
        if exact:
            return cls(ProductTable([], exact=True), SplitPolicy(fixed=_EXACT_PART))
        if model.device.type != "cuda":
            return cls(ProductTable([]))
        gpu = torch.cuda.get_device_properties(model.device)
        table = ProductTable.for_gpu(gpu.name, capability=(gpu.major, gpu.minor))
        return cls(table, None, gpu.multi_processor_count)


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Inputs of a step. `slot`, `token`, `position`: int32 [R]; `items`: the attention's, by cache group. A
    row without a sequence has any token, at first a random one."""

    slot: Tensor
    token: Tensor
    position: Tensor
    items: tuple[Items, ...]


class DecodePass:
    """Buffers for up to `rows` rows, and the launches that fill them."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        block_tables: tuple[Tensor, ...],
        rows: int,
        options: PassOptions,
    ) -> None:
        self.options = options
        self._model = model
        self._cache = cache
        self._tables = block_tables
        self.workspace = Workspace(model, rows)
        config, device, activations = model.config, model.device, model.precision.activations
        self.logits = torch.zeros(rows, config.vocab_size, dtype=activations, device=device)
        self.gemm = Gemm(
            model,
            batches_up_to(rows),
            lambda product, rows: options.table.choice(ProductKey.of(product, rows, activations)),
        )
        self.heads = attention_heads(model)
        self._group_tokens = [_pool_tokens(group) for group in cache.groups]

        def ints() -> Tensor:
            return torch.zeros(rows, dtype=torch.int32, device=device)

        shape = config.num_heads, config.num_kv_heads, config.head_dim
        # Few rows may be cut into more items than many are.
        most = [
            max(self.most_items(group, n) for n in batches_up_to(rows)) for group in range(len(cache.groups))
        ]
        items = [Items(rows, count, *shape, device) for count in most]
        tokens = torch.tensor(random_tokens(config.vocab_size, rows), dtype=torch.int32, device=device)
        self.inputs = RowInputs(ints(), tokens, ints(), tuple(items))

    def policy(self, rows: int) -> SplitPolicy:
        """How attention is cut in steps of up to `rows` rows."""
        options, kv_heads = self.options, self._model.config.num_kv_heads
        resident, quantised = self.tuning(0, rows).resident, self._cache.scales[0] is not None
        return options.policy or SplitPolicy.filling(
            options.multiprocessors, kv_heads, rows, resident, quantised
        )

    def tuning(self, group: int, rows: int) -> AttentionTuning:
        """How attention of a cache group is tuned in steps of up to `rows` rows."""
        options, quantised = self.options, self._cache.scales[group] is not None
        return options.attention or AttentionTuning.of(
            self.heads[group], rows, options.multiprocessors, quantised
        )

    def most_items(self, group: int, rows: int) -> int:
        """Items that a step of `rows` rows may have."""
        return self.policy(rows).most_items(rows, self._group_tokens[group])

    def run(self, rows: int) -> Tensor:
        """Launches the pass over the first `rows` rows → logits [rows, vocab], a view of a buffer."""
        self.embed(rows, self.workspace)

        def attend(attention: Attention) -> Tensor:
            return self.attend(attention, rows, self.workspace)

        run_layers(self._model, self.workspace, rows, attend, self.gemm)
        return self.head(rows, self.workspace)

    def embed(self, rows: int, workspace: Workspace) -> None:
        """Launches the embedding of the input tokens, and the rotary tables of their positions."""
        embed_rows(self._model, workspace, rows, self.inputs.token, self.inputs.position)

    def attend(self, attention: Attention, rows: int, workspace: Workspace) -> Tensor:
        """Launches a layer's attention over `qkv` of the workspace → [rows, heads · dim], in its
        `attn_out`."""
        group = attention.group
        attn_out = workspace.attn_out[:rows]
        split_attention(
            attn_out,
            workspace.qkv[:rows],
            self._cache.groups[group],
            attention.index,
            self._tables[group],
            workspace.rotary(rows, attention.rope),
            self.inputs.items[group],
            self.heads[group],
            attention.head_norms,
            self.tuning(group, rows),
            self.most_items(group, rows),
            self._cache.scales[group],
        )
        return attn_out

    def head(self, rows: int, workspace: Workspace) -> Tensor:
        """Launches the final norm and the head's product over `hidden` of the workspace → logits [rows,
        vocab], a view of a buffer."""
        logits = self.logits[:rows]
        self.gemm(self._model.head, logits, workspace.hidden[:rows])
        return logits


def _pool_tokens(group: Tensor) -> int:
    return group.shape[0] * group.shape[4]
