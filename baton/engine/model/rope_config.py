"""The rotary embedding's parameters, as `config.json` states them. Torch-free.

New files have `rope_parameters`; older ones have `rope_theta` beside `rope_scaling`. Where a file has both,
`rope_scaling` counts unless it is empty, as in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.model_files import ConfigFile

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`type` is one of ROPE_TYPES; a field that its type does not use keeps its default."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    # llama3: wavelengths between original/low and original/high are blended.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn: the ramp's two ends in rotations, and what cos and sin are multiplied by.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def read_rope(file: ConfigFile, max_positions: int) -> RopeConfig:
    """Raises BatonError(INVALID) for types other than ROPE_TYPES and for missing or nonsense parameters."""
    sections = (file.section("rope_scaling"), file.section("rope_parameters"))
    section = next((one for one in sections if one is not None and one.values), ConfigFile(file.path, {}))
    return _rope(file, section, file.positive_number("rope_theta", 10_000.0), max_positions)


def read_rope_by_layer_type(file: ConfigFile, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of layers that see all tokens and of layers with a window, as Gemma 3 has them.

    Raises BatonError(INVALID) as `read_rope` does.
    """
    nothing = ConfigFile(file.path, {})
    by_type = file.section("rope_parameters") or nothing
    scaling = file.section("rope_scaling") or by_type.section("full_attention") or nothing
    theta, local_theta = (
        file.positive_number("rope_theta", 1_000_000.0),
        file.positive_number("rope_local_base_freq", 10_000.0),
    )
    local = by_type.section("sliding_attention") or nothing
    return _rope(file, scaling, theta, max_positions), _rope(file, local, local_theta, max_positions)


def _rope(file: ConfigFile, section: ConfigFile, theta: float, max_positions: int) -> RopeConfig:
    """`section`: the embedding's own parameters; `theta`: where it has none."""
    kind = section.text("rope_type", section.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise file.error("rope_type", f"{kind!r} is not supported (supported: {', '.join(ROPE_TYPES)})")
    for source in (file, section):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise file.error("partial_rotary_factor", "rotating only part of a head is not supported")
    theta = section.positive_number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, section.positive_number("factor"))
    original = file if file.get("original_max_position_embeddings") is not None else section
    original_max = original.positive("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return _llama3(section, theta, original_max)
    return _yarn(section, theta, original_max, max_positions)


def _llama3(section: ConfigFile, theta: float, original_max: int) -> RopeConfig:
    low, high = section.positive_number("low_freq_factor"), section.positive_number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f"{high} must be above low_freq_factor {low}")
    return RopeConfig(
        "llama3",
        theta,
        section.positive_number("factor"),
        original_max,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(section: ConfigFile, theta: float, original_max: int, max_positions: int) -> RopeConfig:
    given = section.get("attention_factor") is not None
    return RopeConfig(
        "yarn",
        theta,
        section.positive_number("factor", max_positions / original_max),
        original_max,
        beta_fast=section.positive_number("beta_fast", 32.0),
        beta_slow=section.positive_number("beta_slow", 1.0),
        attention_factor=section.positive_number("attention_factor") if given else None,
        mscale=section.number("mscale", 0.0),
        mscale_all_dim=section.number("mscale_all_dim", 0.0),
        truncate=section.flag("truncate", True),
    )
