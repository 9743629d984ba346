"""A model of a known shape with random weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.shapes import Shape, torch_dtype, with_positions


def random_model(
    shape: Shape, dtype: str, tokens: int, block_tokens: int, device: str, quantization: str | None = None
) -> Any:
    """A model for sequences of up to `tokens` tokens. Weights are drawn by the device's own generator: of
    no meaning, but of the right size. `quantization`: as `--quantization`."""
    import torch

    from baton.engine.model.families.registry import load_config
    from baton.engine.model.modules import Model, Precision
    from baton.engine.model.quantization.held import held_formats
    from baton.engine.model.weights import weight_places

    kind, place = getattr(torch, torch_dtype(dtype)), torch.device(device)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(with_positions(shape, tokens).config))
        config = load_config(folder)
    layout = config.layout(block_tokens, torch_dtype(dtype))
    weights = weight_places(config, place, kind, held_formats(config, quantization))
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            weight.randomize_()
        elif name.endswith("norm.weight"):
            weight.fill_(1)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    model = Model(config, weights, layout, place, Precision.of(kind))
    del weights
    if place.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return model
