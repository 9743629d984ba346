"""A model of a known shape with random weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.shapes import Shape, cache_dtype, torch_dtype, with_positions

if TYPE_CHECKING:
    from baton.engine.memory.kv_cache import KVCache

# Blocks of a cache that are drawn at once.
_BLOCKS = 64


def random_model(
    shape: Shape,
    dtype: str,
    tokens: int,
    block_tokens: int,
    device: str,
    quantization: str | None = None,
    kv_dtype: str = "auto",
    *,
    quantize_head: bool = False,
) -> Any:
    """A model for sequences of up to `tokens` tokens. Weights are drawn by the device's own generator: of
    no meaning, but of the right size. `quantization`, `quantize_head`, `kv_dtype`: as a worker's options."""
    import torch

    from baton.engine.model.families.registry import load_config
    from baton.engine.model.modules import Model, Precision
    from baton.engine.model.weight_formats import weight_formats
    from baton.engine.model.weights import weight_places

    kind, place = getattr(torch, torch_dtype(dtype)), torch.device(device)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(with_positions(shape, tokens).config))
        config = load_config(folder)
    cache = cache_dtype(dtype, kv_dtype)
    layout = config.layout(block_tokens, cache)
    weights = weight_places(
        config, place, kind, weight_formats(config, quantization, quantize_head=quantize_head)
    )
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            weight.randomize_()
        elif name.endswith("norm.weight"):
            weight.fill_(1)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    model = Model(config, weights, layout, place, Precision.of(kind, getattr(torch, cache)))
    del weights
    if place.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return model


def randomize(cache: KVCache) -> None:
    """Fills a cache with normal values, or with codes and scales that stand for such."""
    import torch

    from baton.engine.kernels.reference.kv_codes import quantise

    for group, scales in zip(cache.groups, cache.scales, strict=True):
        for start in range(0, group.shape[0], _BLOCKS):
            part = slice(start, start + _BLOCKS)
            if scales is None:
                group[part].normal_()
                continue
            codes, found = quantise(torch.randn(group[part].shape, device=group.device))
            group[part].copy_(codes)
            scales[part].copy_(found.movedim(2, -1))
