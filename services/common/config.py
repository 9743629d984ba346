"""Configuration of every process: frozen, typed, unknown keys refused, each default stated once.

`baton up` resolves file, environment and flags into these and hands each child its own as JSON.
A misspelt key is an error, since a setting silently lost costs more than a start refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

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

DRAIN_S = 20.0  # how long running requests may take to end at a stop


class StrictModel(BaseModel):
    """Frozen, and an unknown key is an error. What is wrong is never repeated in an error's text."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


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
    slots: int = Field(16, ge=1, le=4096, description="static slots of a decode worker's batch")
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

    name: str = Field(pattern="^[A-Za-z0-9._-]{1,96}$")
    role: Role
    model: str
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: any free port, reported when ready")
    metrics_port: int | None = Field(0, ge=0, le=65535, description="0: any free port; null: no metrics")
    served_model_name: str | None = Field(None, description="names it in metrics; unset: the folder's name")
    restarts: int = Field(0, ge=0, description="how often a supervisor has started this worker again")
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    state: StateConfig | None = Field(None, description="unset: it is in no registry")
    prefix_secret: str = Field("", repr=False, description="names cached blocks; unset: drawn, for itself")
    drain_s: float = Field(DRAIN_S, ge=0, description="how long running sequences may take to end at a stop")
    log_level: LogLevel = "info"

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
    max_waiting: int = Field(1024, ge=1, description="requests that may wait for a slot; more are refused")
    queue_timeout_s: float = Field(60.0, gt=0, description="the longest wait for a slot")
    request_timeout_s: float = Field(600.0, gt=0, description="the longest life of a request")
    prefill_ahead_tokens: int = Field(2048, ge=1, description="queued tokens at which a prefill worker waits")
    max_attempts: int = Field(3, ge=1)
    tokenizer_threads: int = Field(2, ge=1)


class RouterConfig(RouterSettings):
    """The door, and where it leads."""

    model: str = Field(description="folder with tokenizer.json and the model's configuration")
    served_model_name: str
    byte_tokenizer: bool = Field(False, description="a token a byte: no tokenizer.json")
    workers: tuple[str, ...] = Field((), description="host:port of the workers' gRPC fronts, until told more")
    state: StateConfig | None = Field(None, description="unset: neither registry nor journal")
    prefix_secret: str = Field("", repr=False, description="the workers'; unset: it cannot tell who has what")
    drain_s: float = Field(DRAIN_S, ge=0)
    log_level: LogLevel = "info"


class SupervisionSettings(StrictModel):
    """What an operator may set of how workers are started and watched."""

    ray_address: str = Field("local", min_length=1, description="local: a Ray of our own; none: without Ray")
    hang_timeout_s: float = Field(5.0, gt=0, description="a worker silent for so long is killed")


class ClusterConfig(SupervisionSettings):
    """The process that has Ray run the workers, or runs them itself."""

    cluster_id: str = Field(pattern="^[0-9a-z-]+$", description="random: two clusters never meet in one Ray")
    workers: tuple[WorkerConfig, ...]
    worker_program: tuple[str, ...] = Field((), description="unset: python -m services.worker")
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
        description="names cached blocks: with it a disk's are found after a restart; unset: drawn",
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
    def _can_serve(self) -> UpConfig:
        counts = self.role_counts
        for role in ("prefill", "decode"):
            if not counts["both"] and not counts[role]:
                raise ValueError(
                    f"these workers cannot serve: none does {role} (add one of role {role} or both)"
                )
        return self
