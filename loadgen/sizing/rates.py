"""Measured rates of one model on one kind of GPU, from a YAML file or shipped with loadgen."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from loadgen.common.errors import LoadgenError, reason_of
from loadgen.common.settings import Strict

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Curve = dict[Annotated[int, Field(ge=1)], Positive]

_SHIPPED = resources.files("loadgen.sizing") / "rates"


class Rates(Strict):
    """What one prefill worker and one decode worker do alone. Each has a GPU for itself."""

    model: str = Field(description="model and precision")
    gpu: str = Field(description="kind of GPU")
    source: str = Field(description="where the rates were measured")
    prefill_ms: Curve = Field(description="prompt tokens: time to compute such a prompt alone, in ms")
    decode_step_ms: Curve = Field(description="batch: time of a decode step, in ms")
    decode_context: float = Field(gt=0, description="mean length of the sequences in those steps, in tokens")
    kv_bytes_per_token: int = Field(ge=1, description="bytes of KV that a token takes")
    kv_read_gb_s: float = Field(gt=0, description="rate at which a step reads further KV")
    kv_gb: float = Field(gt=0, description="KV memory of a decode worker in GB")
    ttft_overhead_ms: float = Field(0.0, ge=0, description="what router and handoff add to TTFT")
    tpot_factor: float = Field(1.0, ge=1, description="TPOT of a cluster / time of its decode steps")

    @field_validator("prefill_ms", "decode_step_ms")
    @classmethod
    def _sorted(cls, curve: dict[int, float]) -> dict[int, float]:
        if len(curve) < 2:
            raise ValueError("needs two points or more")
        return dict(sorted(curve.items()))

    @model_validator(mode="after")
    def _grows(self) -> Self:
        for name in ("prefill_ms", "decode_step_ms"):
            times = list(getattr(self, name).values())
            if times != sorted(times):
                raise ValueError(f"{name} must not fall")
        return self

    @property
    def max_batch(self) -> int:
        """The largest batch that was measured; nothing is extrapolated beyond it."""
        return max(self.decode_step_ms)

    def prefill_s(self, tokens: float) -> float:
        """Seconds to compute a prompt of so many tokens alone. Linear between the measured points, and beyond
        them with the slope of the last two; below them as long as the shortest.
        """
        lengths, times = list(self.prefill_ms), list(self.prefill_ms.values())
        if tokens <= lengths[-1]:
            return float(np.interp(tokens, lengths, times)) / 1e3
        slope = (times[-1] - times[-2]) / (lengths[-1] - lengths[-2])
        return (times[-1] + slope * (tokens - lengths[-1])) / 1e3

    def step_s(self, batch: float, context: float) -> float:
        """Seconds of a decode step of a batch whose sequences have so many tokens on average."""
        base = float(np.interp(batch, list(self.decode_step_ms), list(self.decode_step_ms.values()))) / 1e3
        further = batch * (context - self.decode_context) * self.kv_bytes_per_token
        # Shorter sequences save what longer ones cost, but no step is shorter than that of one sequence.
        return max(base + further / (self.kv_read_gb_s * 1e9), min(self.decode_step_ms.values()) / 1e3)


def shipped() -> list[str]:
    """Names of the rates that loadgen has."""
    return sorted(Path(entry.name).stem for entry in _SHIPPED.iterdir() if entry.name.endswith(".yaml"))


def read_rates(name: str) -> Rates:
    """Rates by the name of shipped ones, or from a file. Raises LoadgenError where they cannot be read."""
    place: Traversable = _SHIPPED / f"{name}.yaml" if name in shipped() else Path(name)
    try:
        content = yaml.safe_load(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(shipped())
        raise LoadgenError(f"{name} is neither a file nor one of the shipped rates ({known})") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LoadgenError(f"{name}: {' '.join(reason_of(error).split())}") from None
    try:
        return Rates.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise LoadgenError(f"{name}: {where + ': ' if where else ''}{first['msg']}") from None
