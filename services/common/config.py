"""Configuration of every process: frozen, typed, unknown keys refused, each default stated once.

`baton up` resolves file, environment and flags into these and hands each child its own as JSON.
A misspelt key is an error, since a setting silently lost costs more than a start refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from baton.addresses import is_loopback
from baton.admin_address import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from baton.cluster_auth import MIN_SECRET_LENGTH
from services.common.connection_limits import ConnectionLimits
from services.common.strict_model import StrictModel

Role = Literal["prefill", "decode", "both"]
Device = Literal["auto", "cpu", "cuda"]
DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _dtype_name(value: object) -> object:
    return DTYPE_SPELLINGS.get(value, value) if isinstance(value, str) else value


DType = Annotated[Literal["auto", "bfloat16", "float16", "float32", "float64"], BeforeValidator(_dtype_name)]
Numerics = Literal["auto", "exact", "fast"]
Transport = Literal["auto", "grpc", "ipc", "nccl"]
KVWire = Literal["native", "fp8", "int8"]
Weights = Literal["file", "random"]
LogLevel = Literal["debug", "info", "warning", "error"]

# In place of Redis's URL: neither registry nor journal.
NO_STATE = "none"

# Slots of a decode worker where none are configured: on a CPU, and the most on a GPU.
CPU_SLOTS, MOST_DEFAULT_SLOTS = 16, 256

DRAIN_S = 20.0  # how long running requests may take to end at a stop


# Of a process: what its internal RPCs and links are authenticated with.
ClusterSecret = Field(
    "", repr=False, description="shared by the cluster's processes; empty only where all listen on loopback"
)


class EngineConfig(StrictModel):
    """What one engine process needs; the same for every role."""

    device: Device = "auto"
    device_index: int | None = Field(
        None,
        ge=0,
        description="which of the GPUs that CUDA shows; unset: in turn, and the first for a lone worker",
    )
    dtype: DType = "auto"
    numerics: Numerics = "auto"
    weights: Weights = "file"
    weights_seed: int = Field(0, ge=0, description="seed of --weights random, the same on every worker")
    kernel_cache: str | None = Field(
        None, description="folder of compiled kernels; unset: $TRITON_CACHE_DIR, else ~/.triton/cache"
    )
    block_tokens: int | None = Field(
        None, ge=1, le=1024, description="tokens a KV block holds; unset: 64 on a GPU, 16 on a CPU"
    )
    gpu_memory: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory that its workers take together, in equal parts"
    )
    gpu_workers: int | None = Field(
        None,
        ge=1,
        description="workers that share a GPU, at most; unset: one, but all where there is one GPU",
    )
    gpu_links: int | None = Field(
        None,
        ge=0,
        description="links with other workers that its GPU has memory for, up to 256 MiB each; unset: one "
        "with each that it gets prompts from, or by NCCL hands them to",
    )
    kv_memory_mb: int | None = Field(
        None,
        ge=1,
        description="memory for KV blocks; unset: 512 on a CPU, on a GPU what gpu_memory leaves for them",
    )
    kv_blocks: int | None = Field(None, ge=2, description="KV blocks a cache group has; unset: by memory")
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="sequences that a decode worker generates at once; unset: 16 on a CPU, on a GPU as many "
        "as its KV blocks hold of 1,024 tokens each, from 16 to 256",
    )
    chunk_tokens: int | None = Field(
        None, ge=1, description="prompt tokens one prefill step computes at most; unset: 256, on a GPU 2048"
    )
    prefill_step_ms: float = Field(
        25.0,
        gt=0,
        description="expected length of a prefill step, at most; while others come a prompt that takes more "
        "than one gets half of that",
    )
    prefill_age_cap_ms: float = Field(
        2000.0, ge=0, description="a prompt that is here so long gets an eighth of all steps, at least"
    )
    prefill_graphs: bool = Field(
        True, description="on a GPU, prefill steps of up to 1,024 rows as CUDA graphs"
    )
    max_context_tokens: int | None = Field(None, ge=2, description="unset: the model's own")
    max_logprobs: int = Field(
        20, ge=0, le=20, description="likeliest tokens whose logprobs a request may ask for; 0: no logprobs"
    )
    host_kv_mb: int = Field(
        512,
        ge=0,
        description="memory of the host for KV blocks of paused sequences; 0: they are moved at once",
    )
    reserve_output_tokens: int | None = Field(
        None,
        ge=1,
        description="output tokens that a slot is given KV blocks for at first, and more as it needs them; "
        "unset: what nine of ten requests had of late",
    )
    prefix_cache: bool = Field(True, description="reuse the KV blocks of prompts that begin alike")
    prefix_host_mb: int = Field(
        0, ge=0, description="memory of the host for cached blocks that the device has no room for; 0: none"
    )
    prefix_disk_dir: str | None = Field(
        None, description="folder for cached blocks that the host's memory has no room for; unset: none"
    )
    prefix_disk_mb: int = Field(4096, ge=1, description="what they may take there, for each worker")
    prefill_queue: int = Field(256, ge=1, description="prefills a worker holds, waiting or running")

    @model_validator(mode="after")
    def _disk_is_behind_the_host(self) -> EngineConfig:
        if self.prefix_disk_dir is not None and not self.prefix_host_mb:
            raise ValueError("prefix_disk_dir needs prefix_host_mb: a disk's blocks pass through that memory")
        return self

    @property
    def most_slots(self) -> int:
        """A bound of the slots, known before the engine has found its device and memory: what a worker's two
        processes share is sized for so many."""
        return self.slots or MOST_DEFAULT_SLOTS

    def block_tokens_on(self, device: str) -> int:
        """Tokens of a KV block on a device of this type (`cuda` or `cpu`)."""
        return self.block_tokens or (64 if device == "cuda" else 16)

    def chunk_tokens_on(self, device: str) -> int:
        """Tokens of a prefill step, at most, on a device of this type."""
        return self.chunk_tokens or (2048 if device == "cuda" else 256)


class TransferConfig(StrictModel):
    """Links between workers."""

    transport: Transport = Field(
        "auto",
        description="ipc: within one host, nccl: between GPUs, grpc: anywhere; auto: ipc where both ends "
        "can, else grpc",
    )
    kv_wire: KVWire = Field(
        "native",
        description="how KV travels: as it is kept, or in eight bits an element with a scale for each token "
        "and head, which halves 16-bit KV and loses some precision; in eight bits it goes through the host",
    )
    piece_bytes: int = Field(1024 * 1024, ge=4096, le=1024 * 1024)
    window_pieces: int = Field(32, ge=2, le=65536, description="staging pieces a link has on its receiver")
    peer_timeout_s: float = Field(10.0, gt=0, description="the longest wait on a peer's answer")
    transfer_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="where a decode worker listens for links over grpc or nccl; 0: any free port. Of several "
        "that `baton up` starts the first has it, each further one the next port",
    )
    frames_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="where it listens for the frames of nccl's links; 0: any free port. Of several as above",
    )

    def of_worker(self, index: int) -> TransferConfig:
        """That of the `index`-th of several workers: its ports are that much higher."""
        ports = {"transfer_port": self.transfer_port, "frames_port": self.frames_port}
        return self.model_copy(update={name: port and port + index for name, port in ports.items()})

    @property
    def through_host(self) -> bool:
        """Whether blocks always travel through the host, where they lie on GPUs too."""
        return self.transport == "grpc" or self.kv_wire != "native"

    @model_validator(mode="after")
    def _eight_bits_go_through_the_host(self) -> TransferConfig:
        if self.kv_wire != "native" and self.transport == "nccl":
            raise ValueError(f"kv_wire {self.kv_wire} goes through the host, transport nccl does not")
        return self


class StateSettings(StrictModel):
    """What an operator may set of where soft state is kept."""

    redis_url: str | None = Field(
        None, repr=False, description="unset: a server of our own, which needs nothing; none: no state"
    )
    namespace: str | None = Field(
        None,
        pattern="^[A-Za-z0-9_-]{1,64}$",
        description="what shares it is one cluster; unset: this one's alone",
    )


class StateConfig(StrictModel):
    """Where a process finds the cluster's soft state. Its text form shows no secret."""

    redis_url: str = Field(repr=False)
    namespace: str
    cluster_id: str = Field("", description="goes before the names of its workers in the registry")
    embedded: bool = Field(False, description="a server of `baton up`'s own")
    journal_key: str = Field("", repr=False, description="hex; empty: what is written is for nobody else")


class WorkerConfig(StrictModel):
    """One worker: a gRPC front process and one engine process."""

    # Begins with a letter or digit, so that it is no path such as "..": it names a folder of the disk cache.
    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
    role: Role
    model: str
    cluster_id: str = Field("", description="whose worker it is: its name is unique among them alone")
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: any free port, reported when ready")
    metrics_port: int | None = Field(0, ge=0, le=65535, description="0: any free port; null: no metrics")
    served_model_name: str | None = Field(
        None,
        description="what clients call the model; a router uses only workers of its own name; unset: "
        "the folder's name",
    )
    restarts: int = Field(0, ge=0, description="how often a supervisor has started this worker again")
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    state: StateConfig | None = Field(None, description="unset: it is in no registry")
    prefix_secret: str = Field("", repr=False, description="names cached blocks; unset: drawn, for itself")
    cluster_secret: str = ClusterSecret
    drain_s: float = Field(DRAIN_S, ge=0, description="how long running sequences may take to end at a stop")
    log_level: LogLevel = "info"

    @property
    def served_name(self) -> str:
        """What clients call the model that this worker serves."""
        return self.served_model_name or Path(self.model).name

    def on_gpu(self, index: int | None, workers: int) -> WorkerConfig:
        """This worker on that GPU of its host, shared by `workers` where the configuration says no number."""
        engine = self.engine
        placed = {"device_index": index, "gpu_workers": engine.gpu_workers or workers}
        return self.model_copy(update={"engine": engine.model_copy(update=placed)})


class RouterSettings(StrictModel):
    """What an operator may set of the door."""

    host: str = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535, description="0: any free port")
    grpc_port: int = Field(50051, ge=0, le=65535, description="0: any free port")
    public_metrics: bool | None = Field(
        None, description="serve /metrics on http_port as well; unset: only where host is loopback"
    )
    admin_host: str = Field("127.0.0.1", description="address of the two admin ports")
    admin_grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description=f"AdminService; unset: {DEFAULT_GRPC_PORT}, or any free port where grpc_port is 0",
    )
    admin_http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description=f"metrics and health; unset: {DEFAULT_HTTP_PORT}, or any free port where grpc_port is 0",
    )
    max_waiting: int = Field(1024, ge=1, description="requests that may wait for a slot; more are refused")
    waiting_share: float = Field(
        0.125,
        gt=0,
        le=1,
        description="part of max_waiting that the choices of one request may take; its others wait for them",
    )
    pool: str | None = Field(
        None,
        pattern="^[0-9a-f]{12}$",
        description="id of the pool of workers that serves the model (`baton pool list`); unset: the first "
        "that is ready",
    )
    queue_timeout_s: float = Field(60.0, gt=0, description="the longest wait for a slot")
    request_timeout_s: float = Field(600.0, gt=0, description="the longest life of a request")
    prefill_ahead_tokens: int = Field(2048, ge=1, description="queued tokens at which a prefill worker waits")
    max_attempts: int = Field(3, ge=1)
    tokenizer_threads: int = Field(2, ge=1)
    max_body_bytes: int | None = Field(
        None,
        ge=65536,
        description="largest request, HTTP body or gRPC message; unset: 1 MiB + 16 bytes a token of context",
    )
    max_answer_values: int = Field(
        1_048_576,
        ge=1,
        description="numbers in one answer: outputs x tokens x (1, or 2 + logprobs where they are asked for)",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="names that HTTP requests may have in Host, `.example.com` for a domain, `*` for any; "
        "unset: loopback names where the listener is on loopback, else any",
    )
    connections: ConnectionLimits = ConnectionLimits()

    @property
    def admin_ports(self) -> tuple[int, int]:
        """The ports of AdminService and of admin HTTP to bind; 0: any free port."""
        # Several clusters of one host get free ports; fixed defaults would collide.
        defaults = (DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT) if self.grpc_port else (0, 0)
        given = (self.admin_grpc_port, self.admin_http_port)
        grpc, http = (
            port if port is not None else unset for port, unset in zip(given, defaults, strict=True)
        )
        return grpc, http

    @property
    def serves_public_metrics(self) -> bool:
        """Whether /metrics is on the public HTTP port too."""
        return is_loopback(self.host) if self.public_metrics is None else self.public_metrics


class RouterConfig(RouterSettings):
    """The door, and where it leads."""

    model: str = Field(description="folder with tokenizer.json and the model's configuration")
    served_model_name: str
    byte_tokenizer: bool = Field(False, description="a token a byte: no tokenizer.json")
    workers: tuple[str, ...] = Field((), description="host:port of the workers' gRPC fronts, until told more")
    state: StateConfig | None = Field(None, description="unset: neither registry nor journal")
    prefix_secret: str = Field("", repr=False, description="the workers'; unset: it cannot tell who has what")
    cluster_secret: str = ClusterSecret
    drain_s: float = Field(DRAIN_S, ge=0)
    log_level: LogLevel = "info"


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


class UpConfig(StrictModel):
    """`baton up`: the file an operator writes. `baton.cli` makes the children's configurations of it."""

    model: str | None = Field(None, description="folder, hub id, demo or random; unset: demo")
    served_model_name: str | None = Field(None, description="unset: the folder's name or the hub id")
    prefill: int | None = Field(None, ge=0, description="prefill workers")
    decode: int | None = Field(None, ge=0, description="decode workers")
    both: int | None = Field(None, ge=0, description="workers that do both")
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterSettings = RouterSettings()
    supervision: SupervisionSettings = SupervisionSettings()
    state: StateSettings = StateSettings()
    prefix_secret: str | None = Field(
        None,
        min_length=16,
        repr=False,
        description="names cached blocks: with it a disk's are found after a restart; unset: derived from "
        "cluster_secret",
    )
    worker_metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="where the first worker has its metrics, each further one has the next port; 0: any free",
    )
    cluster_secret: str | None = Field(
        None,
        min_length=MIN_SECRET_LENGTH,
        repr=False,
        description="authenticates router and workers to each other; unset: drawn. A `baton worker` that is "
        "to join needs the same",
    )
    cluster_secret_file: Path | None = Field(None, description="file that holds it, in its place")
    router_restarts: int = Field(
        8,
        ge=0,
        description="restarts in a row of a router that does not live for a minute; then all is stopped",
    )
    start_timeout_s: float = Field(600.0, gt=0, description="how long one process may take to be ready")
    drain_s: float = Field(DRAIN_S, ge=0, le=24, description="how long running requests may take to end")
    log_level: LogLevel = "info"

    @property
    def role_counts(self) -> dict[Role, int]:
        """Workers of each role: one prefill and one decode, but once a role is named only the named ones."""
        if self.prefill is None and self.decode is None and self.both is None:
            return {"prefill": 1, "decode": 1, "both": 0}
        return {"prefill": self.prefill or 0, "decode": self.decode or 0, "both": self.both or 0}

    def engine_of(self, role: Role) -> EngineConfig:
        """With `gpu_links` as many as a worker of this role will have among those that are asked for."""
        if self.engine.gpu_links is not None:
            return self.engine
        counts = self.role_counts
        # Unless they go by NCCL, what a sender's GPU copies lies in its blocks until then.
        sent_to = counts["decode"] if self.transfer.transport == "nccl" else 0
        peers = {"prefill": sent_to, "decode": counts["prefill"], "both": 0}[role]
        links = 0 if self.transfer.through_host else peers
        return self.engine.model_copy(update={"gpu_links": links})

    @model_validator(mode="after")
    def _ports_are_apart(self) -> UpConfig:
        counts = self.role_counts
        listening, everyone = counts["decode"], sum(counts.values())
        fixed = (
            ("transfer.transfer_port", self.transfer.transfer_port, listening),
            ("transfer.frames_port", self.transfer.frames_port, listening),
            ("worker_metrics_port", self.worker_metrics_port, everyone),
        )
        taken: dict[int, str] = {}
        for name, first, count in fixed:
            for port in range(first, first + count) if first else ():
                if port > 65535:
                    raise ValueError(f"{name} {first} leaves too few ports for {count} workers")
                if port in taken:
                    raise ValueError(f"{taken[port]} and {name} both need port {port}")
                taken[port] = name
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
