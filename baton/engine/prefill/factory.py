"""Chooses the pass that prefills prompts: that of the GPU kernels, or the reference on a CPU, in mode `exact`
and in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.device.streams.cuda_stream import on_device
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.memory.kv_cache import BlockMemory
from baton.engine.model.modules import Model
from baton.engine.model.reference import ReferenceModel
from baton.engine.parallel.rank_exchange import DeviceGroup
from baton.engine.prefill.prompt_pass import PromptPass
from baton.engine.prefill.reference_pass import ReferencePass

# Rows of the largest steps that are graphs on several devices, since the host launches for all of them; where
# decode steps may join there is a graph for each number of their rows, and there are fewer.
_SEVERAL_DEVICES_ROWS = 2048


def prompt_pass(
    ranks: Sequence[Model],
    cache: BlockMemory,
    most_rows: int,
    *,
    exact: bool,
    graphs: bool = True,
    joined: Sequence[JoinedRows] = (),
    group: DeviceGroup | None = None,
    interpreted: bool = False,
) -> PromptPass:
    """The prefill pass for a model's devices, one a rank, and its dtype, of up to `most_rows` rows. On GPUs
    this compiles kernels, lets the attention library build its plans and captures graphs: seconds.
    `graphs`: whether short steps are. `joined`: rows that may join a pass (`DecodeLoop.mixed`). `group`: how
    several GPUs exchange, which they do unless `exact`. `interpreted`: the same on a CPU, with Triton's
    interpreter."""
    model = ranks[0]
    on_gpu = model.device.type == "cuda" and model.precision.activations != torch.float64
    if exact or not (on_gpu or interpreted):
        return ReferencePass(ReferenceModel(*ranks), cache)
    from baton.engine.prefill.attention import library_rule
    from baton.engine.prefill.gpu_pass import PrefillPass

    if group is not None:
        return _on_several(ranks, cache, most_rows, graphs, joined, group)
    (own,) = cache.ranks
    made = PrefillPass(model, own, most_rows, library_rule(model, most_rows), joined=joined)
    made.warm()
    made.measure_products()
    if graphs:
        made.capture()
    made.measure_step_times()
    _empty_caches(ranks)
    return made


def _on_several(
    ranks: Sequence[Model],
    cache: BlockMemory,
    most_rows: int,
    graphs: bool,
    joined: Sequence[JoinedRows],
    group: DeviceGroup,
) -> PromptPass:
    """Without the attention library, which allocates its results: a device that waits for memory while
    another waits for its launches would hold up both."""
    from baton.engine.prefill.gpu_pass import PrefillPass
    from baton.engine.prefill.graphs import GraphBounds
    from baton.engine.prefill.group_pass import GroupPass

    joins = [list(joined), *([each.followers[n] for each in joined] for n in range(len(ranks) - 1))]
    passes = []
    for model, own, mine, exchange in zip(ranks, cache.ranks, joins, group.ranks, strict=True):
        with on_device(model.device):
            passes.append(PrefillPass(model, own, most_rows, None, joined=mine, exchange=exchange))
    made = GroupPass(passes, group)
    with group.solo():
        made.warm()
        made.measure_products()
        if graphs:
            made.capture(GraphBounds() if joined else GraphBounds(rows=_SEVERAL_DEVICES_ROWS))
    made.measure_step_times()
    _empty_caches(ranks)
    return made


def _empty_caches(ranks: Sequence[Model]) -> None:
    """Frees what torch keeps of the streams on which kernels were warmed up: steps have others."""
    for model in ranks:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
            torch.cuda.empty_cache()
