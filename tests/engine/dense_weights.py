"""Weights that are not quantised, typed as the tensors that they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.kernels.quantized_weight import Weight
from baton.engine.model import weight_places as places
from baton.engine.model import weights
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.weight_reader import Progress, Target

Device = torch.device | str


def targets(places: Mapping[str, Tensor]) -> dict[str, list[Target]]:
    """Places that each take a stored tensor whole."""
    return {name: [Target.whole(tensor)] for name, tensor in places.items()}


def tensors(found: Mapping[str, Weight]) -> dict[str, Tensor]:
    dense = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    assert dense.keys() == found.keys()
    return dense


def load_weights(config: ModelConfig, folder: Path, device: Device, dtype: torch.dtype) -> dict[str, Tensor]:
    return tensors(weights.load_weights(config, folder, device, dtype))


def random_weights(
    config: ModelConfig,
    seed: int,
    device: Device,
    dtype: torch.dtype,
    progress: Progress = lambda done, total: None,
) -> dict[str, Tensor]:
    return tensors(weights.random_weights(config, seed, device, dtype, progress))


def weight_places(config: ModelConfig, device: Device, dtype: torch.dtype) -> dict[str, Tensor]:
    return tensors(places.weight_places(config, device, dtype))


def packed(config: ModelConfig, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return tensors(weights.packed(config, parts))
