"""A profile: measured costs of one model on one kind of GPU, from a YAML file or shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from baton.perf_model.curve import Curve
from baton.perf_model.step_costs import StepCosts

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Points = dict[Annotated[int, Field(ge=1)], Positive]

_SHIPPED = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """A profile cannot be read; the message names the file and the key."""


class Profile(BaseModel):
    """Measured times of one prefill worker and of one decode worker, each alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="model and precision")
    gpu: str = Field(description="kind of GPU")
    source: str = Field(description="where the profile was measured")
    prefill_ms: Points = Field(description="prompt tokens: time to compute such a prompt alone, in ms")
    decode_step_ms: Points = Field(description="batch: time of a decode step, in ms")
    decode_context: float = Field(gt=0, description="mean length of the sequences in those steps, in tokens")
    kv_bytes_per_token: int = Field(ge=1, description="bytes of KV that a token takes")
    kv_read_gb_s: float = Field(gt=0, description="rate at which a step reads further KV")
    kv_gb: float = Field(gt=0, description="KV memory of a decode worker in GB")
    link_gb_s: Positive | None = Field(None, description="rate at which a worker sends KV; unset: any")
    ttft_overhead_ms: float = Field(0.0, ge=0, description="what router and handoff add to TTFT")
    tpot_factor: float = Field(1.0, ge=1, description="TPOT of a cluster / time of its decode steps")
    tokens_a_step: float = Field(1.0, ge=1, description="tokens that a step gives a sequence on average")
    worker_gpus: int = Field(1, ge=1, description="GPUs of a worker")

    @field_validator("prefill_ms", "decode_step_ms")
    @classmethod
    def _ascending(cls, points: dict[int, float]) -> dict[int, float]:
        if len(points) < 2:
            raise ValueError("needs two points or more")
        points = dict(sorted(points.items()))
        if list(points.values()) != sorted(points.values()):
            raise ValueError("must not fall")
        return points

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.costs.decode_step_s <= 0:
            raise ValueError("decode_step_ms is shorter than reading the sequences' KV at kv_read_gb_s")
        return self

    @property
    def max_batch(self) -> int:
        """The largest batch that was measured."""
        return max(self.decode_step_ms)

    @property
    def costs(self) -> StepCosts:
        """Costs of its steps: linear between the measured points. Longer prompts go on with the slope of the
        last two points; in larger batches a further sequence adds its KV alone."""
        context_s = self.kv_bytes_per_token / (self.kv_read_gb_s * 1e9)
        batches = tuple(self.decode_step_ms)
        bare = [
            ms / 1e3 - batch * self.decode_context * context_s for batch, ms in self.decode_step_ms.items()
        ]
        return StepCosts(
            decode_step_s=bare[0],
            decode_context_token_s=context_s,
            decode_curve=Curve(batches, tuple(each - bare[0] for each in bare)),
            tokens_a_step=self.tokens_a_step,
            prompt_curve=Curve(tuple(self.prefill_ms), tuple(ms / 1e3 for ms in self.prefill_ms.values())),
        )

    def holds(self, tokens: float) -> bool:
        """True if the KV memory has room for `tokens` tokens of all sequences together."""
        return tokens * self.kv_bytes_per_token <= self.kv_gb * 1e9

    def transfer_bytes(self, tokens: float) -> float:
        """Bytes of a handoff of `tokens` tokens."""
        return tokens * self.kv_bytes_per_token

    def transfer_s(self, tokens: float) -> float:
        """Seconds that a handoff of `tokens` tokens occupies the link."""
        return 0.0 if self.link_gb_s is None else self.transfer_bytes(tokens) / (self.link_gb_s * 1e9)


def shipped() -> list[str]:
    """Names of the profiles that are part of this package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def read_profile(name: str) -> Profile:
    """A profile by the name of a shipped one, or from a file. Raises ProfileError."""
    place = _SHIPPED / f"{name}.yaml" if name in shipped() else Path(name)
    try:
        return Profile.model_validate(yaml.safe_load(place.read_text(encoding="utf-8")))
    except FileNotFoundError:
        known = ", ".join(shipped())
        raise ProfileError(f"{name} is neither a file nor one of the shipped profiles ({known})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ProfileError(f"{name}: {where + ': ' if where else ''}{first['msg']}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ProfileError(f"{name}: {' '.join(reason.split())}") from None
