"""The rotary embedding's parameters, as `config.json` states them. Torch-free.

New files have `rope_parameters`; older ones have `rope_theta` beside `rope_scaling`. Where a file has both,
`rope_scaling` counts unless it is empty, as in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.model_spec.model_files import ConfigFile

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
# All but longrope, which families that have it read from keys of their own.
_COMMON_TYPES = ROPE_TYPES[:4]
# Values of fields that came later; they are left out of digests.
LATER_FIELDS: dict[str, object] = {"rotated_share": 1.0, "short_factors": (), "long_factors": ()}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of a rotary embedding. `type` is one of ROPE_TYPES; a field that its type does not use keeps
    its default."""

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


def read_rope(file: ConfigFile) -> RopeConfig:
    """The rotary embedding of a model that has one for all layers.

    Raises BatonError(INVALID) for types other than the first four and for missing or nonsense parameters.
    """
    return rope_of_section(file, rope_section(file), file.positive_number("rope_theta", 10_000.0))


def rope_section(file: ConfigFile) -> ConfigFile:
    """The first section of the file that has parameters, or an empty one."""
    sections = (file.section("rope_scaling"), file.section("rope_parameters"))
    return next((one for one in sections if one is not None and one.values), ConfigFile(file.path, {}))


def original_positions(file: ConfigFile, section: ConfigFile) -> int:
    """The context that a model was trained for before it was extended."""
    source = file if file.get("original_max_position_embeddings") is not None else section
    return source.positive("original_max_position_embeddings", file.positive("max_position_embeddings"))


def rope_of_section(file: ConfigFile, section: ConfigFile, theta: float) -> RopeConfig:
    """Reads one embedding. `section`: the embedding's own parameters; `theta`: where it has none. Raises as
    `read_rope`."""
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
    original = original_positions(file, section)
    if kind == "llama3":
        return _llama3(section, theta, original)
    given = section.get("attention_factor") is not None
    return RopeConfig(
        kind,
        theta,
        section.positive_number("factor", file.positive("max_position_embeddings") / original),
        original,
        beta_fast=section.positive_number("beta_fast", 32.0),
        beta_slow=section.positive_number("beta_slow", 1.0),
        attention_factor=section.positive_number("attention_factor") if given else None,
        mscale=section.number("mscale", 0.0),
        mscale_all_dim=section.number("mscale_all_dim", 0.0),
        truncate=section.flag("truncate", True),
    )


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
