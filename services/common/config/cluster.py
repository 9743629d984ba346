"""Configuration of the process that starts and supervises the workers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from services.common.config.strict_model import StrictModel
from services.common.config.types import DRAIN_S, LogLevel
from services.common.config.worker import WorkerConfig


class SupervisionSettings(StrictModel):
    """What an operator may set of how workers are started and watched."""

    ray_address: str = Field("local", min_length=1, description="local: a Ray of our own; none: without Ray")
    hang_timeout_s: float = Field(5.0, gt=0, description="a worker silent for so long is killed")
    secrets_file: Path | None = Field(
        None,
        description="absolute path of a YAML file with redis_url, prefix_secret and cluster_secret; a Ray "
        "that is joined (ray_address) needs it, or the variables in its environment, on each machine",
    )

    @property
    def on_another_ray(self) -> bool:
        """Whether workers run on a Ray that `baton up` joins, and so perhaps on other machines."""
        return self.ray_address not in ("local", "none")

    @field_validator("secrets_file")
    @classmethod
    def _same_everywhere(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_absolute():
            raise ValueError("secrets_file must be an absolute path")
        return path


class ClusterConfig(SupervisionSettings):
    """The process that has Ray run the workers, or runs them itself."""

    cluster_id: str = Field(pattern="^[0-9a-z-]+$", description="random: two clusters never meet in one Ray")
    workers: tuple[WorkerConfig, ...]
    worker_program: tuple[str, ...] = Field((), description="unset: python -m services.worker")
    secret_names: tuple[str, ...] = Field((), description="secrets that a worker's machine adds")
    start_timeout_s: float = Field(600.0, gt=0)
    drain_s: float = Field(DRAIN_S, ge=0)
    log_level: LogLevel = "info"
