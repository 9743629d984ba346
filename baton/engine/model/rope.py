"""Rotary embedding tables: inverse frequencies of each rope type, and cos and sin of given positions.

All of it is float32 whatever the model's dtype, as in the models' published code: at float64 the
tables must not be more exact than those the checkpoint was trained and is compared with.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.model.config.rope_config import RopeConfig


class RopeTable:
    """cos and sin for rows of one forward pass; owns the inverse frequencies on the device.

    A frequency of 0 is a pair of dimensions that is not rotated, nor scaled.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies, self.scale = inverse_frequencies(config, head_dim)
        self.frequencies = frequencies.to(device)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [N] int64 → cos, sin, each [N, head_dim / 2] float32."""
        angles = positions[:, None].float() * self.frequencies
        scale = torch.where(self.frequencies != 0, self.scale, 1.0)
        return angles.cos() * scale, angles.sin() * scale


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Returns radians a position [head_dim / 2] float32, and the factor on cos and sin."""
    if config.rotated_share != 1:
        rotated = int(head_dim * config.rotated_share)
        found, scale = inverse_frequencies(replace(config, rotated_share=1.0), rotated)
        return torch.cat((found, torch.zeros((head_dim - rotated) // 2))), scale
    # A base raised to a float32 exponent: the order of casts decides the last bit.
    wavelengths = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.type == "longrope":
        factors = torch.tensor(config.short_factors, dtype=torch.float32)
        return 1.0 / (factors * wavelengths), config.attention_factor or 1.0
    if config.type == "yarn":
        return _yarn(config, head_dim, wavelengths), _yarn_attention_factor(config)
    frequencies = 1.0 / wavelengths
    if config.type == "linear":
        frequencies = frequencies / config.factor
    elif config.type == "llama3":
        frequencies = _llama3(config, frequencies)
    return frequencies, 1.0


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    length = config.original_max_positions
    wavelengths = 2 * math.pi / frequencies
    longest_kept, shortest_scaled = length / config.high_freq_factor, length / config.low_freq_factor
    result = torch.where(wavelengths > shortest_scaled, frequencies / config.factor, frequencies)
    span = config.high_freq_factor - config.low_freq_factor
    blend = (length / wavelengths - config.low_freq_factor) / span
    blended = (1 - blend) * result / config.factor + blend * result
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_scaled)
    return torch.where(between, blended, result)


def _yarn(config: RopeConfig, head_dim: int, wavelengths: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023): a ramp over dimensions from unscaled to fully interpolated frequencies."""

    def dimension(rotations: float) -> float:
        turns = config.original_max_positions / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
