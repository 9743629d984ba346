"""One decode step's forward pass by the GPU kernels: a fixed list of launches for a fixed number of rows.

Everything lives in buffers made once, so that the launches can be captured: tokens and positions of the
rows in, logits out. Results of rows without a sequence are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.decode.step_rows import StepRows
from baton.engine.forward.layer_program import attention_heads, embed_rows, run_layers
from baton.engine.forward.layers.linear import Gemm
from baton.engine.forward.workspace import Workspace
from baton.engine.gemm_dispatch.choice import ProductKey
from baton.engine.gemm_dispatch.table import ProductTable
from baton.engine.kernels.gpu.attention.items import AttentionTuning, Items, SplitPolicy, rows_per_item
from baton.engine.kernels.gpu.attention.slot_attention import slot_attention
from baton.engine.kernels.gpu.attention.split_attention import split_attention
from baton.engine.kernels.gpu.attention.write_kv import write_kv
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.layers.attention import Attention
from baton.engine.model.modules import Model
from baton.engine.parallel.rank_exchange import RankExchange
from baton.engine.plan.decode_rows import batches_up_to
from baton.engine.random_tokens import random_tokens

# Tokens of a part of a row's context in mode `exact`.
_EXACT_PART = 512

# Rows of a slot in steps with drafts, by which attention is cut, and the fewest that most have.
_LIKELY_ROWS, _FEWEST_ROWS = 4, 2


@dataclass(frozen=True, slots=True)
class PassOptions:
    """Options of how a decode pass's kernels are cut. `policy` and `attention`: those of any number of rows;
    None: by rows, heads, the cache's format and `multiprocessors`."""

    table: ProductTable
    policy: SplitPolicy | None = field(default_factory=SplitPolicy)
    multiprocessors: int = 132
    attention: AttentionTuning | None = None

    @property
    def exact(self) -> bool:
        """True in mode `exact`, whose rows have the same bits beside any others."""
        return self.policy is not None and self.policy.fixed is not None

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
        batches: Sequence[int] = (),
        rows_per_slot: int = 1,
        row_count: Tensor | None = None,
        step_rows: StepRows | None = None,
        exchange: RankExchange | None = None,
    ) -> None:
        """`batches`: numbers of rows that it is launched with; empty: those of `batches_up_to(rows)`.
        `rows_per_slot`: rows that a slot may have in launches with several. `row_count`: an integer on the
        device, how many rows of a launch are of slots, for a model with experts. `step_rows`: where the rows
        are; None: in memory of its own. `exchange`: with the other ranks of a model that is divided;
        ValueError where such a model has none, or another has one."""
        if (exchange is None) != (model.config.split.count == 1):
            raise ValueError(f"a pass of {model.config.split} with exchange {exchange}")
        batches = batches or batches_up_to(rows)
        self.options = options
        self._model = model
        self._cache = cache
        self._tables = block_tables
        self._row_count = row_count
        # A row holds a token where `row_count` is no less than its number.
        self._numbers = torch.arange(1, rows + 1, dtype=torch.int32, device=model.device)
        self.workspace = Workspace(model, rows, exact=options.exact)
        config, device, activations = model.config, model.device, model.precision.activations
        self._exchange = exchange
        self._own_logits = torch.zeros(rows, len(config.head_rows), dtype=activations, device=device)
        self.logits = self._own_logits if exchange is None else exchange.logits
        self.gemm = Gemm(
            model,
            batches,
            lambda product, rows: options.table.choice(ProductKey.of(product, rows, activations)),
            exchange,
        )
        self.heads = attention_heads(model)
        self._group_tokens = [_pool_tokens(group) for group in cache.groups]

        shape = config.num_heads, config.num_kv_heads, config.head_dim
        self._rows_per_slot = rows_per_slot

        def lists(several: bool) -> tuple[Items, ...]:
            per_item = rows_per_item(self.heads[0], rows_per_slot) if several else 1
            # Few rows may be cut into more items than many are.
            most = [max(self.most_items(group, n, several) for n in batches) for group in range(len(groups))]
            return tuple(Items(rows, count, *shape, device, per_item) for count in most)

        groups, exact = cache.groups, options.exact
        self.slot_items: tuple[Items, ...] = lists(True) if rows_per_slot > 1 and not exact else ()
        """The items of launches with several rows a slot, by cache group, where one reads the keys and values
        of a slot for all of them; else, in mode `exact`, each row has items of its own."""
        tokens = torch.tensor(random_tokens(config.vocab_size, rows), dtype=torch.int32, device=device)
        step_rows = step_rows or StepRows.empty(rows, device)
        step_rows.token.copy_(tokens)
        self.inputs = RowInputs(step_rows.slot, step_rows.token, step_rows.position, lists(False))

    def policy(self, rows: int, several: bool = False) -> SplitPolicy:
        """Returns the policy that cuts attention into items in steps of up to `rows` rows; `several`: by
        slots, each with up to as many rows as a slot may have."""
        options, kv_heads = self.options, self._model.config.num_kv_heads
        resident, quantised = self.tuning(0, rows, several).resident, self._cache.scales[0] is not None
        return options.policy or SplitPolicy.filling(
            options.multiprocessors, kv_heads, self._entries(rows, several), resident, quantised
        )

    def tuning(self, group: int, rows: int, several: bool = False) -> AttentionTuning:
        """Returns the tuning of a cache group's attention in steps of up to `rows` rows; `several` as for
        `policy`."""
        options, quantised = self.options, self._cache.scales[group] is not None
        heads, entries = self.heads[group], self._entries(rows, several)
        if options.attention is not None:
            return options.attention
        if options.exact:  # how a sum is spread over warps changes its last bit
            return AttentionTuning()
        if several:
            per_item = rows_per_item(heads, self._rows_per_slot)
            return AttentionTuning.of_slots(heads, entries, per_item, options.multiprocessors, quantised)
        return AttentionTuning.of(heads, entries, options.multiprocessors, quantised)

    def most_items(self, group: int, rows: int, several: bool = False) -> int:
        """Items that a step of `rows` rows may have."""
        return self.policy(rows, several).most_items(rows, self._group_tokens[group])

    def _entries(self, rows: int, several: bool) -> int:
        """Returns how many runs of rows are cut into items in a step of `rows` rows: each row, or as many of
        a slot's together as are likely."""
        if not several:
            return rows
        per_item = rows_per_item(self.heads[0], self._rows_per_slot)
        return -(-rows // min(per_item, self._rows_per_slot, _LIKELY_ROWS))

    def run(self, rows: int, row_count: Tensor | None = None) -> Tensor:
        """Launches the pass over the first `rows` rows → logits [rows, vocab], a view of a buffer.

        `row_count`: an integer on the device, where a slot may have several rows, side by side and each a
        token further than the one before: how many rows are of slots.
        """
        self.embed(rows, self.workspace)

        def attend(attention: Attention) -> Tensor:
            return self._attend(attention, rows, row_count)

        run_layers(self._model, self.workspace, rows, attend, self.gemm)
        return self.head(rows, self.workspace)

    def attend_all(self, rows: int, row_count: Tensor | None = None) -> None:
        """Launches the attention of all layers alone, over whatever `qkv` of the workspace holds; the
        arguments are those of `run`."""
        for layer in self._model.layers:
            self._attend(layer.attention, rows, row_count)

    def _attend(self, attention: Attention, rows: int, row_count: Tensor | None) -> Tensor:
        if row_count is not None:
            return self._attend_slots(attention, rows, row_count)
        return self.attend(attention, rows, self.workspace)

    def embed(self, rows: int, workspace: Workspace) -> None:
        """Launches the embedding of the input tokens, and the rotary tables of their positions."""
        embed_rows(self._model, workspace, rows, self.inputs.token, self.inputs.position)
        if workspace.experts is not None:
            if self._row_count is None:
                raise ValueError("experts need to know how many rows are of slots")
            torch.sub(self._row_count, self._numbers[:rows], out=workspace.experts.present[:rows])

    @contextmanager
    def all_rows_present(self) -> Iterator[None]:
        """Makes every row take experts within the context, as rows of sequences do, so that steps without
        sequences can be measured. To be entered and left while no step runs."""
        numbers = self._numbers.clone()
        self._number_rows(torch.zeros_like(numbers))
        try:
            yield
        finally:
            self._number_rows(numbers)

    def _number_rows(self, numbers: Tensor) -> None:
        self._numbers.copy_(numbers)
        if numbers.is_cuda:  # steps run on another stream
            torch.cuda.synchronize(numbers.device)

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

    def _attend_slots(self, attention: Attention, rows: int, row_count: Tensor) -> Tensor:
        """Computes `attend` where a slot may have several rows, which see each other's keys and values. In
        mode `exact` a row is what it is in a step by itself, bit by bit: all are written first."""
        group, workspace = attention.group, self.workspace
        qkv, cache, scales = workspace.qkv[:rows], self._cache.groups[group], self._cache.scales[group]
        heads, table, rotary = self.heads[group], self._tables[group], workspace.rotary(rows, attention.rope)
        if not self.slot_items:
            write_kv(
                qkv, cache, attention.index, table, rotary, row_count, self.inputs.slot, self.inputs.position,
                heads, attention.head_norms, self.tuning(group, rows), scales,
            )  # fmt: skip
            return self.attend(attention, rows, workspace)
        attn_out = workspace.attn_out[:rows]
        slot_attention(
            attn_out, qkv, cache, attention.index, table, rotary, self.slot_items[group], heads,
            attention.head_norms, self.tuning(group, rows, several=True),
            -(-rows // _FEWEST_ROWS) + self.policy(rows, several=True).wanted, scales,
        )  # fmt: skip
        return attn_out

    def head(self, rows: int, workspace: Workspace) -> Tensor:
        """Launches the final norm and the head's product over `hidden` of the workspace → logits [rows,
        vocab], a view of a buffer: of several ranks, the first one's, when all have stored their parts."""
        logits = self._own_logits[:rows]
        self.gemm(self._model.head, logits, workspace.hidden[:rows])
        if self._exchange is not None:
            self._exchange.end(logits, self._model.config.head_rows.start)
        return self.logits[:rows]


def _pool_tokens(group: Tensor) -> int:
    return group.shape[0] * group.shape[4]
