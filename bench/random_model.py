"""A model of a known shape with random weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.shapes import Shape, torch_dtype, with_positions


def random_model(shape: Shape, dtype: str, tokens: int, block_tokens: int, device: str) -> Any:
    """A model for sequences of up to `tokens` tokens. Weights are drawn by the device's own generator: of
    no meaning, but of the right size."""
    import torch

    from baton.engine.model.families.registry import load_config
    from baton.engine.model.modules import Model, Precision
    from baton.engine.model.tensors import tensor_specs

    kind, place = getattr(torch, torch_dtype(dtype)), torch.device(device)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(with_positions(shape, tokens).config))
        config = load_config(folder)
    layout = config.layout(block_tokens, torch_dtype(dtype))

    def random(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(size, device=place, dtype=kind)
        return torch.randn(size, device=place, dtype=kind).mul_(size[-1] ** -0.5)

    weights = {spec.name: random(spec.name, spec.shape) for spec in tensor_specs(config)}
    model = Model(config, weights, layout, place, Precision.of(kind))
    del weights
    if place.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return model
