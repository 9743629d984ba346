"""Chooses the pass that prefills prompts: that of the GPU kernels, or the reference on a CPU, in mode `exact`
and in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.memory.kv_cache import BlockMemory
from baton.engine.model.modules import Model
from baton.engine.model.reference import ReferenceModel
from baton.engine.prefill.prompt_pass import PromptPass
from baton.engine.prefill.reference_pass import ReferencePass


def prompt_pass(
    ranks: Sequence[Model],
    cache: BlockMemory,
    most_rows: int,
    *,
    exact: bool,
    graphs: bool = True,
    joined: Sequence[JoinedRows] = (),
) -> PromptPass:
    """The prefill pass for a model's devices, one a rank, and its dtype, of up to `most_rows` rows. On a GPU,
    of which there is one, this compiles kernels, lets the attention library build its plans and captures
    graphs: seconds. `graphs`: whether short steps are. `joined`: rows that may join a pass
    (`DecodeLoop.joined_rows`)."""
    model = ranks[0]
    if model.device.type != "cuda" or model.precision.activations == torch.float64 or exact:
        return ReferencePass(ReferenceModel(*ranks), cache)
    from baton.engine.prefill.attention import library_rule
    from baton.engine.prefill.gpu_pass import PrefillPass

    (own,) = cache.ranks
    made = PrefillPass(model, own, most_rows, library_rule(model, most_rows), joined=joined)
    made.warm()
    made.measure_products()
    if graphs:
        made.capture()
    made.measure_step_times()
    torch.cuda.synchronize(model.device)
    torch.cuda.empty_cache()  # of another stream than the steps'
    return made
