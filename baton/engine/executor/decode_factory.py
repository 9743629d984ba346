"""Makes the decode loop of a worker: graphs on a GPU; plain torch on a CPU, and for float64 anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from baton.device.shared_memory import SharedMemory
from baton.engine.decode.slot_state import SlotState
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.executor.reference_decode_loop import ReferenceDecodeLoop
from baton.engine.memory.kv_cache import BlockMemory
from baton.engine.model.modules import Model
from baton.engine.model.reference import ReferenceModel
from baton.engine.parallel.rank_exchange import DeviceGroup
from baton.engine.shared_memory.layout import SharedRings


def decode_loop(
    ranks: Sequence[Model],
    cache: BlockMemory,
    state: SlotState,
    rings: SharedRings,
    memory: SharedMemory,
    *,
    exact: bool,
    serves: bool = True,
    mixes: bool = False,
    interpreted: bool = False,
    before_step: Callable[[float], None] | None = None,
    propose: Callable[[], None] | None = None,
    adaptive: bool = False,
    clock: Callable[[], float] = time.monotonic,
    group: DeviceGroup | None = None,
) -> DecodeLoop:
    """The loop for a model's devices, one a rank, and its precision. On GPUs this compiles and captures:
    seconds.

    `serves`: False where no slot will ever be admitted, and nothing need be captured. `mixes`: whether steps
    of graphs may be part of prefill steps. `interpreted`: graphs on a CPU too, whose kernels run in Triton's
    interpreter. `before_step`: see `ReferenceDecodeLoop`. `propose`: of graphs, see `DraftRows`.
    `adaptive`: see `DecodeLoop`. `clock`: of graphs, monotonic seconds. `group`: how the ranks exchange in
    steps of graphs; None: as GPUs that compute no prompts do.
    """
    model = ranks[0]
    on_gpu = model.device.type == "cuda" and model.precision.activations != torch.float64
    if interpreted or (serves and on_gpu):
        # They bring Triton, which a CPU worker needs not.
        from baton.device.host_memory import HostMemory
        from baton.engine.decode.gpu_pass import PassOptions
        from baton.engine.executor.graph_decode_loop import GraphDecodeLoop

        host = HostMemory(memory, model.device)
        options = PassOptions.of(model, exact=exact)
        if group is None and len(ranks) > 1:
            from baton.engine.decode.gpu_group import gpu_group

            group = gpu_group(ranks, state.shape.rows)
        own, *others = cache.ranks
        return GraphDecodeLoop(
            model, own, state, rings, host, options, clock, mixes=mixes, propose=propose, adaptive=adaptive,
            followers=list(zip(ranks[1:], others, strict=True)), group=group,
        )  # fmt: skip
    box, ring, progress = rings.mailbox(memory), rings.writer(memory), rings.progress(memory)
    return ReferenceDecodeLoop(
        ReferenceModel(*ranks), cache, state, box, ring, progress, before_step, adaptive=adaptive
    )
