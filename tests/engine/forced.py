"""Logits of the decode kernels on given tokens: every position a step of its own, from the first on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from baton.engine.decode.gpu_pass import DecodePass, PassOptions
from baton.engine.kernels.quantized_weight import Weight
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.modules import Model, Precision
from baton.engine.model.tensors import EMBEDDING
from tests.engine.split_reference import fill_items, split_items

BLOCK_TOKENS = 64


def decoded_logits(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    token_ids: Tensor,
    *,
    exact: bool,
    cache_dtype: torch.dtype | None = None,
) -> Tensor:
    """token_ids [B, L] → [B, L, vocab] float32 on the CPU, in the dtype of the embedding and on its device.
    `cache_dtype`: where it is not that.

    The same kernels, cut in the same way, as the graph of a step with B rows; blocks dealt out shuffled.
    """
    embedding = weights[EMBEDDING]
    assert isinstance(embedding, Tensor)
    dtype, device = embedding.dtype, embedding.device
    layout = config.layout(BLOCK_TOKENS, str(cache_dtype or dtype).removeprefix("torch."))
    model = Model(config, weights, layout, device, Precision.of(dtype, cache_dtype))
    batch, length = token_ids.shape
    width = -(-length // BLOCK_TOKENS)
    cache = KVCache(layout, 1 + batch * width, device)
    shuffled = torch.randperm(batch * width, generator=torch.Generator().manual_seed(1))
    table = (1 + shuffled).view(batch, width).int().to(device)
    options = PassOptions.of(model, exact=exact)
    row_count = torch.tensor([batch], device=device)
    tables = tuple(table for _ in layout.groups)
    step = DecodePass(model, cache, tables, batch, options, row_count=row_count)
    step.inputs.slot.copy_(torch.arange(batch))
    out = torch.empty(batch, length, config.vocab_size)
    for position in range(length):
        step.inputs.token.copy_(token_ids[:, position])
        step.inputs.position.fill_(position)
        for items, group in zip(step.inputs.items, layout.groups, strict=True):
            plan = split_items([position] * batch, group.window, step.policy(batch))
            fill_items(items, plan, step.inputs.slot, step.inputs.position)
        out[:, position] = step.run(batch).float().cpu()
    return out


def relative_rms(logits: Tensor, reference: Tensor) -> float:
    """The error's root mean square as a share of the reference's."""
    error = (logits.double() - reference.double()).pow(2).mean().sqrt()
    return float(error / reference.double().pow(2).mean().sqrt())
