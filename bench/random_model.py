"""A model of a known shape with random weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.precision import Precision
from bench.shapes import Shape, with_positions

if TYPE_CHECKING:
    from baton.engine.memory.kv_cache import KVCache

# Blocks of a cache that are drawn at once.
_BLOCKS = 64


def random_model(shape: Shape, precision: Precision, tokens: int, block_tokens: int, device: str) -> Any:
    """A model for sequences of up to `tokens` tokens. Weights are drawn by the device's own generator: of
    no meaning, but of the right size."""
    import torch

    from baton.engine.model import modules
    from baton.engine.model.families.registry import load_config
    from baton.engine.model.weight_formats import weight_formats
    from baton.engine.model.weights import weight_places

    kind, place = getattr(torch, precision.torch_dtype), torch.device(device)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(with_positions(shape, tokens).config))
        config = load_config(folder)
    layout = config.layout(block_tokens, precision.cache_dtype)
    formats = weight_formats(config, precision.quantization, quantize_head=precision.quantize_head)
    weights = weight_places(config, place, kind, formats)
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            weight.randomize_()
        elif name.endswith("norm.weight"):
            weight.fill_(1)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    kinds = modules.Precision.of(kind, getattr(torch, precision.cache_dtype))
    model = modules.Model(config, weights, layout, place, kinds)
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
