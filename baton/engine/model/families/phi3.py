"""Phi-3 and Phi-4-mini: fused projections, rotary embedding of a share of each head, and LongRoPE (Ding et
al. 2024) in models of long contexts."""

from __future__ import annotations

import math
from dataclasses import replace

from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.config.rope_config import RopeConfig, original_positions, rope_section
from baton.engine.model.families.decoder import read_decoder, read_head_dim, read_window
from baton.model_spec.model_files import ConfigFile


def phi3(file: ConfigFile) -> ModelConfig:
    head_dim = read_head_dim(file)
    config = read_decoder(file, "phi3", rope=_rope(file, head_dim), head_dim=head_dim)
    windows = (read_window(file, None),) * config.num_layers
    return replace(config, layer_windows=windows, fused_projections=True)


def _rope(file: ConfigFile, head_dim: int) -> RopeConfig:
    section = rope_section(file)
    share = file.positive_number("partial_rotary_factor", 1.0)
    share = section.positive_number("partial_rotary_factor", share)
    rotated = int(head_dim * share)
    if rotated > head_dim or rotated % 2 or not rotated:
        text = f"{share} of {head_dim} dimensions is no even number of them"
        raise file.error("partial_rotary_factor", text)
    theta = section.positive_number("rope_theta", file.positive_number("rope_theta", 10_000.0))
    kind = section.text("rope_type", section.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta, rotated_share=share)
    if kind not in ("longrope", "su", "yarn"):  # older names of the same
        raise file.error("rope_type", f"{kind!r} is not supported (supported: default, longrope)")
    original = original_positions(file, section)
    factor = section.positive_number("factor", file.positive("max_position_embeddings") / original)
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=section.positive_number("attention_factor", _attention_factor(factor, original)),
        rotated_share=share,
        short_factors=_factors(section, "short_factor", rotated // 2),
        long_factors=_factors(section, "long_factor", rotated // 2),
    )


def _attention_factor(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _factors(section: ConfigFile, key: str, count: int) -> tuple[float, ...]:
    found = section.get(key)
    if not isinstance(found, list) or len(found) != count:
        raise section.error(key, f"expected a list of {count} numbers")
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and one > 0 for one in found):
        raise section.error(key, "expected numbers above 0")
    return tuple(map(float, found))
