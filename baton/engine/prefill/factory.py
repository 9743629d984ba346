"""Which back end runs a decode loop: graphs on a GPU, plain torch on a CPU and for float64 anywhere; and
which runs prompts: kernels on a GPU, but plain torch in mode `exact`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.reference import Decoder
from baton.engine.prefill.loop import PromptPass
from baton.engine.prefill.reference_pass import PlainPass

if TYPE_CHECKING:
    # Imported where it is used: it brings Triton, which a CPU worker needs not.
    pass


def prompt_pass(
    decoder: Decoder, cache: KVCache, most_rows: int, *, exact: bool, graphs: bool = True
) -> PromptPass:
    """The prefill pass for this decoder's device and dtype, of up to `most_rows` rows. On a GPU this compiles
    kernels, lets the attention library build its plans and captures graphs: seconds. `graphs`: whether
    short steps are."""
    if decoder.device.type != "cuda" or decoder.dtype == torch.float64 or exact:
        return PlainPass(decoder, cache)
    from baton.engine.prefill.attention import library_rule
    from baton.engine.prefill.gpu_pass import PrefillPass

    made = PrefillPass(decoder, cache, most_rows, library_rule(decoder, most_rows))
    made.warm()
    if graphs:
        made.capture()
    made.take_paces()
    torch.cuda.synchronize(decoder.device)
    torch.cuda.empty_cache()  # of another stream than the steps'
    return made
