"""A model of a known shape with random weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.shapes import Shape, torch_dtype, with_positions


def random_decoder(model: Shape, dtype: str, tokens: int, block_tokens: int, device: str) -> Any:
    """A decoder for sequences of up to `tokens` tokens, with weights from the device's own generator."""
    import torch

    from baton.engine.model.config import ModelConfig
    from baton.engine.model.reference import Decoder
    from baton.engine.model.weights import weight_shapes

    kind, place = getattr(torch, torch_dtype(dtype)), torch.device(device)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(with_positions(model, tokens).config))
        config = ModelConfig.load(folder)
    layout = config.layout(block_tokens, torch_dtype(dtype))

    def random(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(size, device=place, dtype=kind)
        return torch.randn(size, device=place, dtype=kind).mul_(size[-1] ** -0.5)

    weights = {name: random(name, size) for name, size in weight_shapes(config).items()}
    decoder = Decoder(config, weights, layout, place, kind)
    del weights
    if place.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return decoder
