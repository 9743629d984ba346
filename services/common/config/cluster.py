"""Configuration of the processes that start and supervise workers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveFloat, field_validator

from services.common.config.types import DRAIN_S, LogLevel, StrictModel, setting
from services.common.config.worker import WorkerConfig


class SupervisionSettings(StrictModel):
    """The operator's settings of how workers are started and supervised."""

    ray_address: str | None = setting(
        None,
        "Ray of the workers: `local`: a new one; `none`: no Ray; `HOST:PORT`: an existing one; unset: "
        "`local` where Ray is installed",
        flag=True,
        min_length=1,
    )
    hang_timeout_s: PositiveFloat = setting(
        5.0, "time after which a worker that does not answer is restarted; 20 s if it got no processor time"
    )
    secrets_file: Path | None = setting(
        None,
        "absolute path of a YAML file with `redis_url`, `prefix_secret` and `cluster_secret`; on an "
        "existing Ray every machine needs it, or their variables",
        flag=True,
    )

    @property
    def on_ray(self) -> bool:
        """True if workers run in Ray's actors."""
        return self.ray_address not in (None, "none")

    @property
    def on_another_ray(self) -> bool:
        """True if workers run on an existing Ray cluster, and so possibly on other machines."""
        return self.on_ray and self.ray_address != "local"

    @field_validator("secrets_file")
    @classmethod
    def _same_everywhere(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_absolute():
            raise ValueError("secrets_file must be an absolute path")
        return path


class ClusterConfig(SupervisionSettings):
    """Configuration of a process that starts workers: of `baton up`, `baton worker group` or `baton ray
    supervise`."""

    cluster_id: str = Field(
        pattern="^[0-9a-z-]+$", description="random, so that several clusters can share one Ray"
    )
    workers: tuple[WorkerConfig, ...]
    worker_program: tuple[str, ...] = Field((), description="unset: python -m services.worker")
    secret_names: tuple[str, ...] = Field((), description="secrets that are read on a worker's machine")
    secret_files: dict[str, Path] | None = Field(
        None,
        description="of `baton ray supervise`: the file of each secret, at the same path on every Ray node",
    )
    detached: bool = Field(
        False,
        description="of `baton ray supervise`: its workers outlive it, and are adopted when it is back; each "
        "has ports of its place on its node, counted from the configured ones",
    )
    abandoned_s: float = Field(
        600.0, gt=0, description="a detached worker drains and ends after this time without a supervisor"
    )
    name: str = Field("", description="of a group, which its workers share, or of the supervisor")
    host: str = Field("127.0.0.1", min_length=1, description="address at which others reach it")
    admin_http_host: str | None = Field(None, description="address of the admin HTTP port; unset: host")
    admin_http_port: int = Field(0, ge=0, le=65535, description="0: any free port")
    start_timeout_s: float = Field(600.0, gt=0)
    drain_s: float = Field(DRAIN_S, ge=0)
    restart_always: bool = Field(
        False,
        description="also restart a worker whose first start failed, or whose name a newer start has taken",
    )
    log_level: LogLevel = "info"

    @property
    def gpus_needed(self) -> int:
        """GPUs that all workers have together, those counted repeatedly that several workers share."""
        return sum(worker.engine.tensor_parallel for worker in self.workers)

    @property
    def bound_admin_http_host(self) -> str:
        """The address of the admin HTTP port."""
        return self.admin_http_host or self.host
