"""Configuration of the process that starts and supervises the workers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from services.common.config.types import DRAIN_S, LogLevel, StrictModel
from services.common.config.worker import WorkerConfig


class SupervisionSettings(StrictModel):
    """The operator's settings of how workers are started and supervised."""

    ray_address: str = Field(
        "local", min_length=1, description="local: start a Ray cluster; none: run without Ray"
    )
    hang_timeout_s: float = Field(5.0, gt=0, description="a worker without a heartbeat for so long is killed")
    secrets_file: Path | None = Field(
        None,
        description="absolute path of a YAML file with redis_url, prefix_secret and cluster_secret; "
        "where an existing Ray cluster is joined (ray_address), each machine needs it, or "
        "the environment variables",
    )

    @property
    def on_another_ray(self) -> bool:
        """Whether workers run on an existing Ray cluster, and so possibly on other machines."""
        return self.ray_address not in ("local", "none")

    @field_validator("secrets_file")
    @classmethod
    def _same_everywhere(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_absolute():
            raise ValueError("secrets_file must be an absolute path")
        return path


class SecretFiles(StrictModel):
    """Files of secrets, at the same paths on every machine. Each is read where a worker starts."""

    cluster_secret: Path
    prefix_secret: Path | None = Field(None, description="unset: derived from the cluster secret")
    redis_url: Path | None = Field(None, description="unset: the URL in the configuration has no secret")


class DetachedSettings(StrictModel):
    """Workers that outlive their supervisor, which adopts them when it is back (`baton supervise`).

    Each has the address and a name of the Ray node that it runs on: BATON_HOST and BATON_NAME there.
    """

    secret_files: SecretFiles
    abandoned_s: float = Field(
        600.0, gt=0, description="a worker that no supervisor has called for so long drains and ends"
    )


class ClusterConfig(SupervisionSettings):
    """Configuration of the process that starts the workers, on Ray or as children."""

    cluster_id: str = Field(
        pattern="^[0-9a-z-]+$", description="random, so that several clusters can share one Ray"
    )
    workers: tuple[WorkerConfig, ...]
    worker_program: tuple[str, ...] = Field((), description="unset: python -m services.worker")
    secret_names: tuple[str, ...] = Field((), description="secrets that are read on a worker's machine")
    detached: DetachedSettings | None = Field(None, description="unset: workers end with their supervisor")
    start_timeout_s: float = Field(600.0, gt=0)
    drain_s: float = Field(DRAIN_S, ge=0)
    restart_always: bool = Field(
        False,
        description="also restart a worker whose first start failed, or whose name a newer start has taken",
    )
    log_level: LogLevel = "info"


class GroupConfig(ClusterConfig):
    """Configuration of the process of `baton worker-group`, which runs the workers of one container."""

    group: str = Field(description="the name that its workers share")
    admin_http_host: str = "127.0.0.1"
    admin_http_port: int = Field(0, ge=0, le=65535, description="0: any free port")


class SuperviseConfig(StrictModel):
    """Configuration of the process of `baton supervise`. It has no secret."""

    cluster: ClusterConfig
    name: str = Field(description="label of its metrics")
    host: str = Field(min_length=1, description="address of its own Ray node")
    admin_http_host: str | None = Field(None, description="address of the admin HTTP port; unset: host")
    admin_http_port: int = Field(0, ge=0, le=65535, description="0: any free port")

    @property
    def bound_admin_http_host(self) -> str:
        """The address of the admin HTTP port."""
        return self.admin_http_host or self.host
