"""Configuration of `baton up`: the file an operator writes."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from baton.base.cluster_auth import MIN_SECRET_LENGTH
from services.common.config.cluster import SupervisionSettings
from services.common.config.ports import check_port_ranges
from services.common.config.router import RouterSettings
from services.common.config.state import NO_STATE, StateSettings
from services.common.config.tls import Auth
from services.common.config.tracing import TracingSettings
from services.common.config.types import DRAIN_S, LogLevel, Role, StrictModel
from services.common.config.worker import EngineConfig, TransferConfig, check_quantised_once


class UpConfig(StrictModel):
    """Configuration of `baton up`, from which `services.cli` makes those of its children."""

    model: str | None = Field(None, description="folder, hub id, demo or random; unset: demo")
    served_model_name: str | None = Field(None, description="unset: the folder's name or the hub id")
    prefill: int | None = Field(None, ge=0, description="prefill workers")
    decode: int | None = Field(None, ge=0, description="decode workers")
    both: int | None = Field(None, ge=0, description="workers of both roles")
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterSettings = RouterSettings()
    auth: Auth | None = Field(
        None, description="unset: the public ports need no API key, and must be on loopback"
    )
    supervision: SupervisionSettings = SupervisionSettings()
    state: StateSettings = StateSettings()
    tracing: TracingSettings = TracingSettings()
    prefix_secret: str | None = Field(
        None,
        min_length=16,
        repr=False,
        description="keys the hashes of cached blocks, which are found on disk after a restart with the "
        "same secret; unset: derived from cluster_secret",
    )
    worker_metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="metrics port of the first worker, each further one has the next; 0: any free port",
    )
    cluster_secret: str | None = Field(
        None,
        min_length=MIN_SECRET_LENGTH,
        repr=False,
        description="authenticates router and workers to each other; unset: random. A `baton worker` "
        "that joins needs the same",
    )
    cluster_secret_file: Path | None = Field(None, description="file with the cluster secret")
    router_restarts: int = Field(
        8,
        ge=0,
        description="consecutive restarts of a router that runs for less than a minute; then all is stopped",
    )
    start_timeout_s: float = Field(600.0, gt=0, description="longest start of one process")
    drain_s: float = Field(DRAIN_S, ge=0, le=24, description="longest drain at a stop")
    log_level: LogLevel = "info"

    @property
    def role_counts(self) -> dict[Role, int]:
        """Workers of each role: one prefill and one decode by default, otherwise only those configured."""
        if self.prefill is None and self.decode is None and self.both is None:
            return {"prefill": 1, "decode": 1, "both": 0}
        return {"prefill": self.prefill or 0, "decode": self.decode or 0, "both": self.both or 0}

    def engine_of(self, role: Role) -> EngineConfig:
        """The engine configuration of a role, with `gpu_links` for its peers in this cluster."""
        counts = self.role_counts
        return self.engine.with_gpu_links(
            role, counts["prefill"], counts["decode"], self.transfer, counts["both"]
        )

    @model_validator(mode="after")
    def _ports_do_not_overlap(self) -> UpConfig:
        counts = self.role_counts
        exchanging = counts["both"] if self.transfer.both_receives else 0
        if exchanging and counts["decode"] and (self.transfer.transfer_port or self.transfer.frames_port):
            raise ValueError(
                "with both_receives, link ports are for decode workers or for workers of role both"
            )
        listening, everyone = counts["decode"] + exchanging, sum(counts.values())
        check_port_ranges(
            (
                ("transfer.transfer_port", self.transfer.transfer_port, listening),
                ("transfer.frames_port", self.transfer.frames_port, listening),
                ("worker_metrics_port", self.worker_metrics_port, everyone),
            )
        )
        return self

    @model_validator(mode="after")
    def _responses_have_a_store(self) -> UpConfig:
        if self.router.stored_responses.ttl_s is not None and self.state.redis_url == NO_STATE:
            raise ValueError("router.stored_responses.ttl_s needs Redis: state.redis_url is none")
        return self

    @model_validator(mode="after")
    def _quantised_once(self) -> UpConfig:
        check_quantised_once(self.engine, self.transfer)
        return self

    @model_validator(mode="after")
    def _can_serve(self) -> UpConfig:
        counts = self.role_counts
        for role in ("prefill", "decode"):
            if not counts["both"] and not counts[role]:
                raise ValueError(
                    f"these workers cannot serve: none does {role} (add one of role {role} or both)"
                )
        return self
