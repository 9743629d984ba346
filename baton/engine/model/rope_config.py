"""The rotary embedding's parameters, as `config.json` states them. Torch-free.

New files have `rope_parameters`; older ones have `rope_theta` beside `rope_scaling`. Where a file has both,
`rope_scaling` counts unless it is empty, as in transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from baton.model_files import ConfigFile

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
_COMMON_TYPES = ROPE_TYPES[:4]
# Values of fields that came later; they are left out of digests.
LATER_FIELDS: dict[str, object] = {"rotated_share": 1.0, "short_factors": (), "long_factors": ()}


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
    # The share of a head's dimensions that is rotated; the first ones are.
    rotated_share: float = 1.0
    # longrope: what the wavelength of each rotated pair of dimensions is multiplied by.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def for_context(self, tokens: int) -> RopeConfig:
        """The embedding for sequences of up to `tokens` tokens: longrope takes its long factors for all of
        them where that exceeds the original context, else its short ones."""
        if not self.long_factors or tokens <= self.original_max_positions:
            return replace(self, long_factors=())
        return replace(self, short_factors=self.long_factors, long_factors=())


def read_rope(file: ConfigFile, max_positions: int) -> RopeConfig:
    """Raises BatonError(INVALID) for types other than ROPE_TYPES and for missing or nonsense parameters."""
    return _rope(file, _section(file), file.positive_number("rope_theta", 10_000.0), max_positions)


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


def read_partial_rope(file: ConfigFile, max_positions: int, head_dim: int) -> RopeConfig:
    """The rotary embedding of Phi-3: of a share of each head, and by LongRoPE (Ding et al. 2024) in long
    models.

    Raises BatonError(INVALID) as `read_rope` does.
    """
    section = _section(file)
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
    original = file if file.get("original_max_position_embeddings") is not None else section
    original_max = original.positive("original_max_position_embeddings", max_positions)
    factor = section.positive_number("factor", max_positions / original_max)
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original_max,
        attention_factor=section.positive_number("attention_factor", _longrope_factor(factor, original_max)),
        rotated_share=share,
        short_factors=_factors(section, "short_factor", rotated // 2),
        long_factors=_factors(section, "long_factor", rotated // 2),
    )


def _section(file: ConfigFile) -> ConfigFile:
    """The first section of the file that has parameters, or an empty one."""
    sections = (file.section("rope_scaling"), file.section("rope_parameters"))
    return next((one for one in sections if one is not None and one.values), ConfigFile(file.path, {}))


def _longrope_factor(factor: float, original_max: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max))


def _factors(section: ConfigFile, key: str, count: int) -> tuple[float, ...]:
    found = section.get(key)
    if not isinstance(found, list) or len(found) != count:
        raise section.error(key, f"expected a list of {count} numbers")
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and one > 0 for one in found):
        raise section.error(key, "expected numbers above 0")
    return tuple(map(float, found))


def _rope(file: ConfigFile, section: ConfigFile, theta: float, max_positions: int) -> RopeConfig:
    """`section`: the embedding's own parameters; `theta`: where it has none."""
    kind = section.text("rope_type", section.text("type", "default"))
    if kind not in _COMMON_TYPES:
        raise file.error("rope_type", f"{kind!r} is not supported (supported: {', '.join(_COMMON_TYPES)})")
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
