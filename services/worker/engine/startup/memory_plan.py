"""The number of KV blocks and slots of a worker: as configured, or by its share of the memory. Torch-free
arithmetic.

    GPU  │ weights │ other │ links │ KV blocks │  the next worker's share  │ not used: 1 - gpu_memory │
         └───────── this worker's share: gpu_memory / gpu_workers ─┘

Each of a worker's several GPUs has a plan of its own, for its part of the model and for what they exchange,
and all have as many blocks as the one with the least room for them (`plan_devices`). The plan is made before
anything is loaded, and is the same at every start: workers of one GPU start at the same time, so the memory
that is free then does not show which of them will use it.

`links` is the staging memory of `gpu_links` links between GPUs: a window on the receiver's GPU, and for NCCL
as much on the sender's. It is allocated when links are opened, so it looks free at a start. Further links,
and those that follow a link whose window is in quarantine, take unused memory; where there is none, blocks
go over the next transport. NCCL's own buffers are allocated by the driver and not included; they have not
been measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from baton.base.errors import BatonError, ErrorKind
from baton.engine.kernels.expert_tiles import space_bytes
from baton.engine.kernels.product_rows import product_rows
from baton.engine.memory.split_cache import staging_bytes as whole_blocks
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.tensors import HEAD, layer_matrices
from baton.engine.model.weight_formats import weight_formats
from baton.engine.parallel.exchange_layout import ExchangeShape
from baton.engine.shared_memory.step_shape import MOST_DRAFTS, StepShape
from baton.engine.speculation.sizes import history_bytes, slot_draft_bytes
from baton.model_spec.layout import Layout
from kvtransfer.device.blocks import staging_bytes
from services.common.config.worker import CPU_SLOTS, MOST_DEFAULT_SLOTS, EngineConfig, Quantization

CPU_KV_BYTES = 512 * 10**6
# Memory that a process uses on a GPU beside its tensors: context, libraries, kernels, graphs. Measured.
_BASE_BYTES = 1_000 * 2**20
# Tokens of a sequence by which a GPU's slots are counted, where the context is not shorter. An assumption,
# not a measurement: where sequences are longer, blocks run out before slots do, sequences are swapped out or
# preempted, and a reservation waits for blocks instead of a slot; where shorter, some blocks stay unused.
TYPICAL_TOKENS = 1024
# Candidate numbers of slots on a GPU: batch sizes that have a graph and tuned kernels.
_SLOT_CHOICES = (256, 192, 128, 96, 64, 48, 32, 24, 16)
assert _SLOT_CHOICES[0] == MOST_DEFAULT_SLOTS
# Bytes for each row of a decode step and vocabulary entry: logits in the model's dtype, edited logits and
# candidates in float32, groups of these, token counts, masks.
_LOGIT_COPIES_BYTES = 20
# Items of a step's attention beyond one a row, for one KV head: `SplitPolicy.most_items` of an H200, at most.
_MORE_ITEMS = 7 * 132
# Prompt tokens of a mixture's prefill step, where unset, and the share of what weights leave that its buffers
# may take.
_MIXTURE_CHUNKS, _MIXTURE_CHUNKS_SHARE = (8192, 4096), 1 / 8
# Bytes for each element of a prompt's row: residual, norms, products and their inputs, some of them in
# float32.
_ROW_COPIES_BYTES = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's memory in bytes, in total and free."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """KV blocks of each cache group, the scratch block included; slots of the decode batch, and rows that
    each may have in a step; most prompt tokens of a prefill step."""

    kv_blocks: int
    slots: int
    chunk_tokens: int
    rows_per_slot: int = 1


@dataclass(frozen=True, slots=True)
class MemoryPlanner:
    """Plans the memory of one worker. `gpu`: None on a CPU. `quantized_bytes`: of the weights by each
    quantisation that could be asked for. `kernel_bytes`: that loading all kernels at once has taken; 0 where
    each is loaded when it is first launched."""

    config: ModelConfig
    engine: EngineConfig
    layout: Layout
    max_context: int
    weight_bytes: int
    gpu: Gpu | None
    quantized_bytes: Mapping[str, int] = field(default_factory=dict)
    kernel_bytes: int = 0

    def plan(self) -> MemoryPlan:
        """Slots as configured, else CPU_SLOTS on a CPU; on a GPU the largest choice that leaves every slot
        the blocks of a typical sequence. As many drafts as configured, or fewer before fewer slots.

        Raises BatonError: INVALID where the blocks do not fit into the worker's share of the memory,
        UNAVAILABLE where they would, but other processes use that memory now.
        """
        if self.engine.slots is not None or self.gpu is None:
            choices, each = [self.engine.slots or CPU_SLOTS], 0
        else:
            typical = min(self.max_context, TYPICAL_TOKENS)
            choices = list(_SLOT_CHOICES)
            each = max(group.blocks_for(typical) for group in self.layout.groups)
        for slots in choices:
            if self._fitting(slots, 1, each) is None:
                continue
            for rows_per_slot in range(self.engine.rows_per_slot, 0, -1):
                if (plan := self._fitting(slots, rows_per_slot, each)) is not None:
                    return plan
        return self._with_slots(choices[-1], 1)

    def _fitting(self, slots: int, rows_per_slot: int, each: int) -> MemoryPlan | None:
        """The plan for `slots` slots, where it leaves every slot `each` blocks: their buffers may leave too
        little."""
        with contextlib.suppress(BatonError):
            plan = self._with_slots(slots, rows_per_slot)
            return plan if plan.kv_blocks - 1 >= slots * each else None
        return None

    def _with_slots(self, slots: int, rows_per_slot: int) -> MemoryPlan:
        """The plan for `slots` slots: unless configured, at most as many blocks as all of them use at full
        length."""
        engine, block = self.engine, sum(group.block_bytes for group in self.layout.groups)
        useful = slots * max(group.blocks_for(self.max_context) for group in self.layout.groups) + 1
        if engine.kv_blocks is not None:
            blocks = engine.kv_blocks
        elif engine.kv_memory_mb is not None:
            blocks = min(useful, _at_least_two(engine.kv_memory_mb * 10**6, block, "kv_memory_mb"))
        elif self.gpu is None:
            blocks = min(useful, _at_least_two(CPU_KV_BYTES, block, "the default of kv_memory_mb"))
        else:
            shape = StepShape(slots, rows_per_slot)
            other = other_bytes(self.config, engine, shape, self.chunk_tokens)
            other += link_bytes(engine, self.layout) + self.kernel_bytes
            other += exchange_bytes(self.config, engine, shape, self.chunk_tokens)
            other += whole_block_bytes(self.config, self.layout)
            other += draft_bytes(self.config, engine, self.layout, shape, self.max_context)
            # Not left out where memory is short: it was asked for, and what is short is named.
            other += engine.lookahead_table_bytes
            blocks = min(useful, self._of_share(self.gpu, other, block))
        if self.gpu is not None:
            self._check_free(self.gpu, blocks * block)
        return MemoryPlan(blocks, slots, self.chunk_tokens, rows_per_slot)

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of a prefill step: as configured; for a mixture of experts on a GPU, where
        unset, as many as take at most a part of what the weights leave."""
        engine, gpu = self.engine, self.gpu
        if gpu is None or engine.chunk_tokens is not None or self.config.experts is None:
            return engine.chunk_tokens_on("cpu" if gpu is None else "cuda")
        room = (self._share(gpu) - self.weight_bytes) * _MIXTURE_CHUNKS_SHARE
        fitting = (one for one in _MIXTURE_CHUNKS if prefill_bytes(self.config, engine, one) <= room)
        return next(fitting, engine.chunk_tokens_on("cuda"))

    def _share(self, gpu: Gpu) -> int:
        return int(gpu.total_bytes * self.engine.gpu_memory) // (self.engine.gpu_workers or 1)

    def _of_share(self, gpu: Gpu, other: int, block: int) -> int:
        workers, share = self.engine.gpu_workers or 1, self._share(gpu)
        left = share - self.weight_bytes - other
        table = self.engine.lookahead_table_bytes
        if left < 2 * block <= left + table:
            raise BatonError(
                ErrorKind.INVALID,
                f"engine.lookahead_table_mb of {_gb(table)} does not fit: "
                f"{_gb(left + table - 2 * block)} of this worker's {_gb(share)} of {gpu.name} are left "
                "beside weights, buffers and two KV blocks",
            )
        if left < 2 * block:
            among = f", shared by {workers} workers" if workers > 1 else ""
            raise BatonError(
                ErrorKind.INVALID,
                f"the model does not fit: gpu_memory {self.engine.gpu_memory:g} of {gpu.name}'s "
                f"{_gb(gpu.total_bytes)}{among} is {_gb(share)}; weights take {_gb(self.weight_bytes)}, all "
                f"else {_gb(other)}, and two KV blocks {_gb(2 * block)}"
                + self._smaller(share - other - 2 * block),
            )
        return left // block

    def _smaller(self, room: int) -> str:
        """Names the quantisations whose weights fit into `room` bytes."""
        fitting = [f"{name} {_gb(size)}" for name, size in self.quantized_bytes.items() if size <= room]
        return f"; quantized they would take: {', '.join(fitting)}" if fitting else ""

    def _check_free(self, gpu: Gpu, kv_bytes: int) -> None:
        links, table = link_bytes(self.engine, self.layout), self.engine.lookahead_table_bytes
        needed = self.weight_bytes + kv_bytes + links + table
        if needed <= gpu.free_bytes:
            return
        more = f", {_gb(links)} for links," if links else ""
        more += f" a lookahead table of {_gb(table)}" if table else ""
        text = (
            f"weights of {_gb(self.weight_bytes)}{more} and KV blocks of {_gb(kv_bytes)} do not fit on "
            f"{gpu.name}: {_gb(gpu.free_bytes)} of {_gb(gpu.total_bytes)} are free"
        )
        raise BatonError(ErrorKind.UNAVAILABLE if needed <= gpu.total_bytes else ErrorKind.INVALID, text)


def plan_devices(planners: Sequence[MemoryPlanner]) -> MemoryPlan:
    """The plan that all of a worker's devices have room for, each planned for its part of the model: the
    fewest slots of any, and with these the fewest blocks. Raises BatonError as `MemoryPlanner.plan` does."""
    if len(planners) == 1:
        return planners[0].plan()
    slots = min(planner.plan().slots for planner in planners)
    plans = [
        replace(planner, engine=planner.engine.model_copy(update={"slots": slots})).plan()
        for planner in planners
    ]
    return MemoryPlan(
        min(plan.kv_blocks for plan in plans),
        slots,
        min(plan.chunk_tokens for plan in plans),
        min(plan.rows_per_slot for plan in plans),
    )


def other_bytes(
    config: ModelConfig, engine: EngineConfig, shape: StepShape, chunk_tokens: int | None = None
) -> int:
    """Bytes that a worker may use on a GPU beside weights, links, KV blocks and drafts; `chunk_tokens`: of a
    prefill step, by default those of a dense model."""
    logits = shape.rows * config.vocab_size * _LOGIT_COPIES_BYTES
    dequantized = _dequantized_bytes(config, engine.quantization, engine.quantize_head)
    rows = chunk_tokens or engine.chunk_tokens_on("cuda")
    rows = product_rows(rows + (shape.slots if engine.mixed_steps else 0))
    prefill, decode = prefill_bytes(config, engine, rows), _experts_bytes(config, engine, shape.rows)
    return _BASE_BYTES + logits + prefill + decode + dequantized


# The tensors of a mixture are many thousands, and a plan tries many sizes.
@lru_cache(maxsize=8)
def _dequantized_bytes(config: ModelConfig, quantization: Quantization | None, quantize_head: bool) -> int:
    """Bytes of one matrix at full width, of formats whose codes cannot be multiplied by those of many rows;
    those of experts are dequantised in registers."""
    formats = weight_formats(config, quantization, quantize_head=quantize_head)
    matrices = list(_dense_matrices(config))
    if HEAD in formats and (formats[HEAD].codes == "int4" or formats[HEAD].scale_columns):
        matrices.append((config.vocab_size, config.hidden_size))
    return 2 * max(rows * columns for rows, columns in matrices) if formats else 0


@lru_cache(maxsize=8)
def _dense_matrices(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    return tuple(layer_matrices(config, experts=False).values())


def prefill_bytes(config: ModelConfig, engine: EngineConfig, rows: int) -> int:
    """Bytes of a GPU for the activations of prefill steps of up to `rows` rows."""
    widest = max(rows for rows, _ in _dense_matrices(config)) + 4 * config.hidden_size
    return rows * widest * _ROW_COPIES_BYTES + _experts_bytes(config, engine, rows)


def _experts_bytes(config: ModelConfig, engine: EngineConfig, rows: int) -> int:
    """Bytes for the entries and tiles of a mixture's rows; 0 for a dense model."""
    if (experts := config.experts) is None:
        return 0
    hidden, inner = config.hidden_size, experts.intermediate_size
    element, codes = _element_bytes(config, engine), _codes_of_experts(config, engine.quantization)
    return space_bytes(rows, experts.top_k, experts.count, hidden, inner, element, codes=codes)


@lru_cache(maxsize=8)
def _codes_of_experts(config: ModelConfig, quantization: Quantization | None) -> str:
    formats = weight_formats(config, quantization)
    found = {form.codes for key, form in formats.items() if ".experts." in key}
    return "fp8" if "fp8" in found else next(iter(found), "")


def exchange_bytes(config: ModelConfig, engine: EngineConfig, shape: StepShape, chunk_tokens: int) -> int:
    """Bytes of a GPU for what a worker's devices exchange in a step, of as many rows as products of prompts
    are padded to; 0 for one device."""
    if config.split.count == 1:
        return 0
    rows = max(shape.rows, product_rows(chunk_tokens + (shape.rows if engine.mixed_steps else 0)))
    sums, element = 2 * config.num_layers, _element_bytes(config, engine)
    exchange = ExchangeShape(config.split.count, sums, rows, config.hidden_size, element, 4 * rows)
    return exchange.arena_bytes


def whole_block_bytes(config: ModelConfig, layout: Layout) -> int:
    """Bytes of the first of a worker's GPUs for whole blocks, of which `layout` has a rank's heads; 0 for one
    device."""
    count = config.split.count
    return 0 if count == 1 else whole_blocks(count * max(group.block_bytes for group in layout.groups))


def _element_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    """Bytes of an element of a row."""
    return 4 if "float32" in (engine.dtype, config.dtype if engine.dtype == "auto" else "") else 2


def draft_bytes(
    config: ModelConfig, engine: EngineConfig, layout: Layout, shape: StepShape, max_context: int
) -> int:
    """Bytes that a worker may use on a GPU for drafts: histories, drafts, and the partial sums of attention
    of several rows a slot. 0 where steps verify none."""
    if shape.rows_per_slot == 1:
        return 0
    items = shape.rows + _MORE_ITEMS // config.num_kv_heads
    sums = items * (1 + MOST_DRAFTS) * config.num_heads * (config.head_dim + 2) * 4 * len(layout.groups)
    history = history_bytes(shape.slots, engine.history_tokens(max_context))
    return sums + history + slot_draft_bytes(shape.slots)


def link_bytes(engine: EngineConfig, layout: Layout) -> int:
    """Bytes of a GPU for the staging memory of a worker's links."""
    return (engine.gpu_links or 0) * staging_bytes([group.block_bytes for group in layout.groups])


def _at_least_two(budget: int, block: int, setting: str) -> int:
    """Blocks in `budget` bytes, of which one is the scratch block. Raises BatonError(INVALID) for fewer
    than two."""
    if budget < 2 * block:
        raise BatonError(ErrorKind.INVALID, f"{setting} of {_gb(budget)} does not hold two blocks")
    return budget // block


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
