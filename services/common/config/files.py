"""The configuration files of `baton router`, `worker`, `worker-group` and `supervise`.

They hold no secret; they name files of secrets, which `services.cli.common.config_file` reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.common.config.cluster import SupervisionSettings
from services.common.config.router import RouterSettings
from services.common.config.tls import Auth, InternalTls, PublicTls
from services.common.config.tracing import TracingSettings
from services.common.config.types import LogLevel, StrictModel
from services.common.config.worker import EngineConfig, TransferConfig


class StateFile(StrictModel):
    """Where the cluster's soft state is."""

    namespace: str = Field(
        pattern="^[A-Za-z0-9_-]{1,64}$", description="the same for all processes of a cluster"
    )
    redis_url: str | None = Field(None, repr=False, description="a URL without credentials")
    redis_url_file: Path | None = Field(None, description="file with the URL; read again at a reconnect")

    @model_validator(mode="after")
    def _one_url(self) -> StateFile:
        if (self.redis_url is None) == (self.redis_url_file is None):
            raise ValueError("state needs one of redis_url and redis_url_file")
        return self


class RouterStateFile(StateFile):
    """The soft state as a router uses it."""

    journal_key_file: Path | None = Field(
        None, description="64 hex digits, the same for all routers; unset: a random key for each"
    )


class ModelSource(StrictModel):
    """What `baton fetch-model` downloads into the folder `model`."""

    hub_id: str = Field(min_length=1)
    revision: str = "main"
    files: Literal["all", "tokenizer"] = Field("all", description="tokenizer: what a router reads")
    token_file: Path | None = Field(None, description="file with the hub's access token")


class FetchModelFile(BaseModel):
    """What `baton fetch-model` reads of the file of any of the other commands, which check the rest."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str = Field(min_length=1, description="folder to make")
    model_source: ModelSource
    start_timeout_s: float = Field(1800.0, gt=0, description="longest wait for another process's download")


class KeysState(StateFile):
    """What `baton keys` reads of the section `state`."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class KeysFile(BaseModel):
    """What `baton keys` reads of the file of `baton router` or `baton up`, which check the rest."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    cluster_secret_file: Path
    state: KeysState


class Tls(StrictModel):
    """TLS of a worker or supervisor."""

    internal: InternalTls | None = None


class RouterTls(Tls):
    """TLS of a router."""

    public: PublicTls | None = None


class _File(StrictModel):
    """What all files have in common."""

    model: str = Field(
        description="folder of the checkpoint, or demo; a router reads only its tokenizer and config"
    )
    served_model_name: str | None = Field(None, description="unset: the folder's name")
    cluster_secret_file: Path
    prefix_secret_file: Path | None = Field(None, description="unset: derived from the cluster secret")
    state: StateFile
    tls: Tls = Tls()
    require_tls: bool = Field(
        False,
        description="refuse to start where a port that is not on loopback would be plaintext, the admin "
        "HTTP port excepted; false: log a warning for each",
    )
    drain_s: float = Field(20.0, ge=0, description="longest drain at a stop")
    start_timeout_s: float = Field(1800.0, gt=0, description="longest time for a worker to load its model")
    log_level: LogLevel = "info"
    tracing: TracingSettings = TracingSettings()
    model_source: ModelSource | None = None


class RouterFile(_File):
    """The file of `baton router`."""

    state: RouterStateFile
    tls: RouterTls = RouterTls()
    auth: Auth | None = None
    router: RouterSettings = RouterSettings()


class WorkerPorts(StrictModel):
    """Ports of a worker's own process."""

    port: int = Field(0, ge=0, le=65535, description="gRPC port of the (first) worker; 0: any free port")
    admin_http_port: int = Field(
        0, ge=0, le=65535, description="/health, /ready and /metrics of the command's own process"
    )


class WorkerFile(_File):
    """The file of `baton worker`."""

    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    worker: WorkerPorts = WorkerPorts()


class WorkerGroupFile(WorkerFile):
    """The file of `baton worker-group`."""

    worker_metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="metrics port of the first worker, each further one has the next; 0: any free port",
    )


class EngineOfRole(StrictModel):
    """Settings of one role's engines, which take precedence over `engine`."""

    prefill: dict[str, object] = Field(default_factory=dict)
    decode: dict[str, object] = Field(default_factory=dict)


class SuperviseFile(WorkerGroupFile):
    """The file of `baton supervise`."""

    engine_of_role: EngineOfRole = EngineOfRole()
    prefill: int = Field(1, ge=0, description="prefill workers")
    decode: int = Field(1, ge=0, description="decode workers")
    supervision: SupervisionSettings = SupervisionSettings()

    def engine_for(self, role: Literal["prefill", "decode"]) -> EngineConfig:
        """The engine settings of a role. Raises pydantic.ValidationError where they are invalid."""
        own: dict[str, object] = getattr(self.engine_of_role, role)
        return EngineConfig.model_validate(self.engine.model_dump(exclude_unset=True) | own)
