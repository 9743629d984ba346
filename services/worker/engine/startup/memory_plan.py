"""The number of KV blocks and slots of a worker: as configured, or by its share of the memory. Torch-free
arithmetic.

    GPU  │ weights │ other │ links │ KV blocks │  the next worker's share  │ not used: 1 - gpu_memory │
         └───────── this worker's share: gpu_memory / gpu_workers ─┘

The plan is made before anything is loaded, and is the same at every start: workers of one GPU start at the
same time, so the memory that is free then does not show which of them will use it.

`links` is the staging memory of `gpu_links` links between GPUs: a window on the receiver's GPU, and for NCCL
as much on the sender's. It is allocated when links are opened, so it looks free at a start. Further links,
and those that follow a link whose window is in quarantine, take unused memory; where there is none, blocks
go over the next transport. NCCL's own buffers are allocated by the driver and not included; they have not
been measured.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.tensors import HEAD, layer_matrices
from baton.engine.model.weight_formats import weight_formats
from baton.model_spec.layout import Layout
from kvtransfer.device.blocks import staging_bytes
from services.common.config.worker import CPU_SLOTS, MOST_DEFAULT_SLOTS, EngineConfig

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
    """KV blocks of each cache group, the scratch block included, and slots of the decode batch."""

    kv_blocks: int
    slots: int


@dataclass(frozen=True, slots=True)
class MemoryPlanner:
    """Plans the memory of one worker. `gpu`: None on a CPU."""

    config: ModelConfig
    engine: EngineConfig
    layout: Layout
    max_context: int
    weight_bytes: int
    gpu: Gpu | None

    def plan(self) -> MemoryPlan:
        """Slots as configured, else CPU_SLOTS on a CPU; on a GPU the largest choice that leaves every slot
        the blocks of a typical sequence.

        Raises BatonError: INVALID where the blocks do not fit into the worker's share of the memory,
        UNAVAILABLE where they would, but other processes use that memory now.
        """
        if self.engine.slots is not None or self.gpu is None:
            return self._with_slots(self.engine.slots or CPU_SLOTS)
        typical = min(self.max_context, TYPICAL_TOKENS)
        each = max(group.blocks_for(typical) for group in self.layout.groups)
        *more, fewest = _SLOT_CHOICES
        for slots in more:
            # The buffers of so many slots may leave too little for blocks; with the fewest slots that is an
            # error.
            with contextlib.suppress(BatonError):
                plan = self._with_slots(slots)
                if plan.kv_blocks - 1 >= slots * each:
                    return plan
        return self._with_slots(fewest)

    def _with_slots(self, slots: int) -> MemoryPlan:
        """The plan for so many slots: unless configured, at most as many blocks as all of them use at full
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
            other = other_bytes(self.config, engine, slots) + link_bytes(engine, self.layout)
            blocks = min(useful, self._of_share(self.gpu, other, block))
        if self.gpu is not None:
            self._check_free(self.gpu, blocks * block)
        return MemoryPlan(blocks, slots)

    def _of_share(self, gpu: Gpu, other: int, block: int) -> int:
        workers = self.engine.gpu_workers or 1
        share = int(gpu.total_bytes * self.engine.gpu_memory) // workers
        left = share - self.weight_bytes - other
        if left < 2 * block:
            among = f", shared by {workers} workers" if workers > 1 else ""
            raise BatonError(
                ErrorKind.INVALID,
                f"the model does not fit: gpu_memory {self.engine.gpu_memory:g} of {gpu.name}'s "
                f"{_gb(gpu.total_bytes)}{among} is {_gb(share)}; weights take {_gb(self.weight_bytes)}, all "
                f"else {_gb(other)}, and two KV blocks {_gb(2 * block)}",
            )
        return left // block

    def _check_free(self, gpu: Gpu, kv_bytes: int) -> None:
        links = link_bytes(self.engine, self.layout)
        needed = self.weight_bytes + kv_bytes + links
        if needed <= gpu.free_bytes:
            return
        more = f", {_gb(links)} for links," if links else ""
        text = (
            f"weights of {_gb(self.weight_bytes)}{more} and KV blocks of {_gb(kv_bytes)} do not fit on "
            f"{gpu.name}: {_gb(gpu.free_bytes)} of {_gb(gpu.total_bytes)} are free"
        )
        raise BatonError(ErrorKind.UNAVAILABLE if needed <= gpu.total_bytes else ErrorKind.INVALID, text)


def other_bytes(config: ModelConfig, engine: EngineConfig, slots: int) -> int:
    """Bytes that a worker may use on a GPU beside weights, links and KV blocks."""
    decode_rows = slots * engine.rows_per_slot
    logits = decode_rows * config.vocab_size * _LOGIT_COPIES_BYTES
    matrices = list(layer_matrices(config).values())
    widest = max(rows for rows, _ in matrices) + 4 * config.hidden_size
    formats = weight_formats(config, engine.quantization, quantize_head=engine.quantize_head)
    if HEAD in formats and (formats[HEAD].codes == "int4" or formats[HEAD].scale_columns):
        matrices.append((config.vocab_size, config.hidden_size))
    # One matrix at full width, of formats whose codes cannot be multiplied by those of many rows.
    dequantized = 2 * max(rows * columns for rows, columns in matrices) if formats else 0
    rows = engine.chunk_tokens_on("cuda") + (decode_rows if engine.mixed_steps else 0)
    return _BASE_BYTES + logits + rows * widest * _ROW_COPIES_BYTES + dequantized


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
