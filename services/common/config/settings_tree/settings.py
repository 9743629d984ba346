"""The one tree of settings, of which each command reads its view (`views`).

File, environment, flags and files of secrets become a `Settings` in `reader`; from it come the
configurations that processes are started with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator
from pydantic.fields import FieldInfo

from baton.base.cluster_auth import MIN_SECRET_LENGTH, prefix_secret
from services.common.config.cluster import SupervisionSettings
from services.common.config.router import RouterSettings
from services.common.config.state import StateConfig
from services.common.config.tls import Auth, Tls
from services.common.config.tracing import TracingSettings
from services.common.config.transfer import TransferConfig, check_quantised_once
from services.common.config.types import DRAIN_S, LogLevel, Port, Role, StrictModel, fixed, setting
from services.common.config.worker import EngineConfig


class ModelSource(StrictModel):
    """Model that `baton model fetch` downloads into the folder `model`."""

    hub_id: str = setting(..., "id of the model in the hub, such as `owner/llama`", min_length=1)
    revision: str = setting("main", "branch, tag or commit of the model in the hub")
    files: Literal["all", "tokenizer"] = setting("all", "all files, or tokenizer: those that a router reads")
    token_file: Path | None = setting(None, "file with an access token of the hub, for models that need one")


class WorkerPorts(StrictModel):
    """Ports of a worker's own process."""

    port: Port = setting(0, "gRPC port of the first worker, each further one has the next; 0: any free port")
    admin_http_port: Port = setting(
        0, "port of `/health`, `/ready` and `/metrics` of the command; 0: any free port, see its ready line"
    )


# Keys of `engine_of_role` that have a flag and a variable, by path within it.
ROLE_FLAGS: dict[str, FieldInfo] = {
    "prefill.tensor_parallel": setting(
        None,
        "devices of each prefill worker; unset: `engine.tensor_parallel`",
        unit="devices",
        who="experts",
        flag="prefill_tensor_parallel",
    ),
    "decode.tensor_parallel": setting(
        None,
        "devices of each decode worker; unset: `engine.tensor_parallel`. Any number hands over to any other",
        unit="devices",
        who="experts",
        flag="decode_tensor_parallel",
    ),
}


class Settings(StrictModel):
    """All settings that an operator can make."""

    model: str | None = setting(
        None,
        "model to serve: a checkpoint folder, a hub id, `demo` (a tiny model of Baton's own), or `random`; a "
        "router reads tokenizer and configuration alone; unset: `demo`",
        who="everyone",
        flag=True,
    )
    served_model_name: str | None = setting(
        None,
        "name by which clients ask for the model; unset: the folder's name or the hub id",
        who="everyone",
        flag=True,
    )
    prefill: NonNegativeInt | None = setting(
        None,
        "workers that compute prompts; unset: 1, or 0 once `decode` or `both` is given",
        who="everyone",
        unit="workers",
        flag=True,
    )
    decode: NonNegativeInt | None = setting(
        None,
        "workers that generate tokens; unset: 1, or 0 once `prefill` or `both` is given",
        who="everyone",
        unit="workers",
        flag=True,
    )
    both: NonNegativeInt | None = setting(
        None, "workers that do both, which suits a single GPU", who="everyone", unit="workers", flag=True
    )
    engine: EngineConfig = EngineConfig()
    engine_of_role: dict[Role, dict[str, object]] = Field(
        {},
        description="keys of `engine` for the workers of one role (`prefill: {…}`, `decode: {…}`), which "
        "override those of `engine`",
        json_schema_extra={"who": "experts"},
    )
    transfer: TransferConfig = TransferConfig()
    worker: WorkerPorts = WorkerPorts()
    worker_metrics_port: Port = setting(
        0, "metrics port of the first worker, each further one has the next; 0: any free port", flag=True
    )
    router: RouterSettings = RouterSettings()
    auth: Auth | None = Field(
        None,
        description="`none`: serve everyone who reaches the public ports, without API keys",
        json_schema_extra={"who": "operators", "flag": True},
    )
    tls: Tls = Tls()
    require_tls: bool = setting(
        False,
        "refuse to start where a port that others reach would be plaintext, probes and metrics excepted; "
        "false: log a warning for each",
    )
    supervision: SupervisionSettings = SupervisionSettings()
    state: StateConfig = StateConfig()
    tracing: TracingSettings = TracingSettings()
    cluster_secret: str | None = setting(
        None,
        f"secret by which router, workers and operators know each other, at least {MIN_SECRET_LENGTH} "
        "characters; unset: a random one, which `baton up` alone can do with",
        secret=True,
        min_length=MIN_SECRET_LENGTH,
    )
    cluster_secret_file: Path | None = setting(
        None, "file that holds `cluster_secret` and nothing else", flag=True
    )
    prefix_secret: str | None = setting(
        None,
        "secret that keys the hashes of cached blocks; with the same one those on disk are found after a "
        "restart; unset: derived from `cluster_secret`",
        flag=True,
        secret=True,
        min_length=MIN_SECRET_LENGTH,
    )
    prefix_secret_file: Path | None = setting(None, "file that holds `prefix_secret` and nothing else")
    start_timeout_s: PositiveFloat = setting(
        600.0, "longest time for a process to become ready, in which workers load the model"
    )
    drain_s: NonNegativeFloat = setting(
        DRAIN_S, "longest time for running requests to end at a stop; of `baton up` at most 24"
    )
    log_level: LogLevel = setting(
        "info", "least severity that is logged, by every process", who="everyone", flag=True
    )
    model_source: ModelSource | None = None
    router_restarts: int = fixed(8, "it is 8 in a row; then baton up stops everything")

    @property
    def role_counts(self) -> dict[Role, int]:
        """Workers of each role: one prefill and one decode by default, otherwise only those configured."""
        if self.prefill is None and self.decode is None and self.both is None:
            return {"prefill": 1, "decode": 1, "both": 0}
        return {"prefill": self.prefill or 0, "decode": self.decode or 0, "both": self.both or 0}

    def engine_of(self, role: Role) -> EngineConfig:
        """The engine settings of a role, with `gpu_links` for its peers in this cluster. Raises
        pydantic.ValidationError where those of the role alone are invalid."""
        engine = self.engine
        if own := self.engine_of_role.get(role):
            engine = EngineConfig(**(engine.model_dump(exclude_unset=True) | own))
        counts = self.role_counts
        return engine.with_gpu_links(role, counts["prefill"], counts["decode"], self.transfer, counts["both"])

    @property
    def block_secret(self) -> str:
        """The secret that keys the hashes of cached blocks; empty where no secret is given at all."""
        derived = prefix_secret(self.cluster_secret) if self.cluster_secret else ""
        return self.prefix_secret or derived

    @model_validator(mode="after")
    def _quantised_once(self) -> Settings:
        check_quantised_once(self.engine.kv_dtype, self.transfer)
        return self
