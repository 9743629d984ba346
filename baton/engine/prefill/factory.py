"""Which pass prefills prompts: that of the GPU kernels, or the reference on a CPU, in mode `exact` and
in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.modules import Model
from baton.engine.model.reference import ReferenceModel
from baton.engine.prefill.prompt_pass import PromptPass
from baton.engine.prefill.reference_pass import ReferencePass

if TYPE_CHECKING:
    from baton.engine.forward.layer_program import JoinedRows


def prompt_pass(
    model: Model,
    cache: KVCache,
    most_rows: int,
    *,
    exact: bool,
    graphs: bool = True,
    joined: Sequence[JoinedRows] = (),
) -> PromptPass:
    """The prefill pass for this model's device and dtype, of up to `most_rows` rows. On a GPU this compiles
    kernels, lets the attention library build its plans and captures graphs: seconds. `graphs`: whether
    short steps are. `joined`: rows that may join a pass (`DecodeLoop.joined_rows`)."""
    if model.device.type != "cuda" or model.precision.activations == torch.float64 or exact:
        return ReferencePass(ReferenceModel(model), cache)
    from baton.engine.prefill.attention import library_rule
    from baton.engine.prefill.gpu_pass import PrefillPass

    made = PrefillPass(model, cache, most_rows, library_rule(model, most_rows), joined=joined)
    made.warm()
    made.measure_products()
    if graphs:
        made.capture()
    made.measure_step_times()
    torch.cuda.synchronize(model.device)
    torch.cuda.empty_cache()  # of another stream than the steps'
    return made
