"""Configuration of a worker: its engine, its links, and itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from baton.base.prefill_defaults import AGE_CAP_S, ALONE_STEP_S, STEP_S
from services.common.config.state import StateConfig
from services.common.config.tls import InternalTls
from services.common.config.tracing import TracingSettings
from services.common.config.types import DRAIN_S, ClusterSecret, LogLevel, Role, StrictModel

Device = Literal["auto", "cpu", "cuda"]
_DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _dtype_name(value: object) -> object:
    return _DTYPE_SPELLINGS.get(value, value) if isinstance(value, str) else value


DType = Annotated[Literal["auto", "bfloat16", "float16", "float32", "float64"], BeforeValidator(_dtype_name)]
KVDType = Literal["auto", "fp8"]
Numerics = Literal["auto", "exact", "fast"]
Transport = Literal["auto", "grpc", "ipc", "nccl"]
KVWire = Literal["native", "fp8", "int8"]
Weights = Literal["file", "random"]
Quantization = Literal["fp8", "int8", "int4"]

# Default slots of a decode worker: on a CPU, and the most on a GPU.
CPU_SLOTS, MOST_DEFAULT_SLOTS = 16, 256


class EngineConfig(StrictModel):
    """Configuration of an engine process, of any role."""

    device: Device = "auto"
    device_index: int | None = Field(
        None,
        ge=0,
        description="index among the GPUs that CUDA shows; unset: round robin, the first for a single worker",
    )
    dtype: DType = "auto"
    kv_dtype: KVDType = Field(
        "auto",
        description="format of the KV cache: auto: the dtype of the model; fp8: e4m3 with a scale for each "
        "token and head, half the memory of 16 bits. Prefill and decode workers must agree",
    )
    numerics: Numerics = "auto"
    quantization: Quantization | None = Field(
        None,
        description="quantise the layers' matrices while they are loaded: fp8 (e4m3) and int8 by rows, int4 "
        "by groups of 128 columns; unset: as the checkpoint stores them",
    )
    quantize_head: bool = Field(
        False,
        description="quantise the head (lm_head) too, as quantization says; where it is tied to the "
        "embedding, a copy of it",
    )
    weights: Weights = "file"
    weights_seed: int = Field(0, ge=0, description="seed of --weights random, the same on every worker")
    kernel_cache: str | None = Field(
        None, description="folder of compiled kernels; unset: $TRITON_CACHE_DIR, else ~/.triton/cache"
    )
    tune: Literal["auto", "off", "full"] = Field(
        "auto",
        description="measure at the start which kernels compute the model's matrix products fastest: auto: "
        "shapes that no table has, for up to 60 s, kept beside compiled kernels; off: never; full: all of "
        "them, without a limit of time",
    )
    block_tokens: int | None = Field(
        None, ge=1, le=1024, description="tokens of a KV block; unset: 64 on a GPU, 16 on a CPU"
    )
    gpu_memory: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory that its workers use together, in equal parts"
    )
    gpu_workers: int | None = Field(
        None,
        ge=1,
        description="most workers that share a GPU; unset: one, or all of them where there is one GPU",
    )
    gpu_links: int | None = Field(
        None,
        ge=0,
        description="links to other workers that GPU memory is reserved for, up to 256 MiB each; unset: "
        "one to each worker that hands sequences over to it, with NCCL also to each that it "
        "hands over to",
    )
    kv_memory_mb: int | None = Field(
        None, ge=1, description="memory for KV blocks; unset: 512 on a CPU, on a GPU what gpu_memory leaves"
    )
    kv_blocks: int | None = Field(None, ge=2, description="KV blocks of each cache group; unset: by memory")
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="most concurrent sequences of a decode worker; unset: 16 on a CPU, on a GPU as many "
        "of 1,024 tokens as its KV blocks have room for, from 16 to 256",
    )
    rows_per_slot: int = Field(
        1,
        ge=1,
        le=8,
        description="rows that a decode step has for each sequence, one for each token by which it may "
        "advance; a sequence uses one of them, the others are computed and not used",
    )
    chunk_tokens: int | None = Field(
        None, ge=1, description="most prompt tokens of a prefill step; unset: 256, on a GPU 2048"
    )
    prefill_step_ms: float = Field(
        1e3 * STEP_S,
        gt=0,
        description="longest expected duration of a prefill step while short prompts wait or have come "
        "within a second, but for those whose limits leave them time; a prompt that needs several steps then "
        "gets half of each",
    )
    prefill_alone_step_ms: float | None = Field(
        None,
        gt=0,
        description="longest expected duration of a prefill step while none do and the worker decodes "
        "nothing, or two limits of the time per output token of what it decodes take as long; "
        f"unset: {1e3 * ALONE_STEP_S:g} on a GPU, on a CPU prefill_step_ms",
    )
    tpot_slo_ms: float | None = Field(
        None,
        gt=0,
        description="on a worker of role both, prefill steps are paced so that decode steps take no longer "
        "than this on average; unset: only by the limits that requests state",
    )
    prefill_age_cap_ms: float = Field(
        1e3 * AGE_CAP_S,
        ge=0,
        description="a prompt that has waited so long gets at least an eighth of the steps' time",
    )
    prefill_graphs: bool = Field(
        True, description="run prefill steps of up to 1,024 rows as CUDA graphs on a GPU"
    )
    mixed_steps: bool = Field(
        True,
        description="on a GPU worker of role both, run a decode step as part of each prefill step, so that "
        "both read the weights once, unless requests use more than greedy or temperature sampling",
    )
    max_context_tokens: int | None = Field(None, ge=2, description="unset: the model's own")
    max_logprobs: int = Field(
        20, ge=0, le=20, description="most top logprobs that a request may ask for; 0: no logprobs"
    )
    host_kv_mb: int = Field(
        512,
        ge=0,
        description="host memory for KV blocks of swapped-out sequences; 0: sequences are preempted instead",
    )
    reserve_output_tokens: int | None = Field(
        None,
        ge=1,
        description="output tokens to reserve KV blocks for; more are allocated as the sequence grows; "
        "unset: the 90th percentile of recent output lengths",
    )
    prefix_cache: bool = Field(True, description="reuse the KV blocks of common prompt prefixes")
    prefix_host_mb: int = Field(
        0, ge=0, description="host memory for cached blocks that are evicted from the device; 0: none"
    )
    prefix_disk_dir: str | None = Field(
        None, description="folder for cached blocks that are evicted from host memory; unset: none"
    )
    prefix_disk_mb: int = Field(4096, ge=1, description="disk space for them, for each worker")
    prefill_queue: int = Field(256, ge=1, description="most prefills of a worker, queued or running")

    @model_validator(mode="after")
    def _disk_is_behind_the_host(self) -> EngineConfig:
        if self.prefix_disk_dir is not None and not self.prefix_host_mb:
            raise ValueError("prefix_disk_dir needs prefix_host_mb: blocks on disk pass through host memory")
        return self

    @model_validator(mode="after")
    def _head_is_quantised_like_the_rest(self) -> EngineConfig:
        if self.quantize_head and self.quantization is None:
            raise ValueError("quantize_head needs quantization: it says how")
        return self

    @property
    def most_slots(self) -> int:
        """An upper bound of the slots that is known before the engine knows its device and memory; it sizes
        the memory that a worker's two processes share."""
        return self.slots or MOST_DEFAULT_SLOTS

    @property
    def most_rows(self) -> int:
        """An upper bound of a decode step's rows, known as early as `most_slots`."""
        return self.most_slots * self.rows_per_slot

    def block_tokens_on(self, device: str) -> int:
        """Tokens of a KV block on a device type, `cuda` or `cpu`."""
        return self.block_tokens or (64 if device == "cuda" else 16)

    def chunk_tokens_on(self, device: str) -> int:
        """Most tokens of a prefill step on a device type, `cuda` or `cpu`."""
        return self.chunk_tokens or (2048 if device == "cuda" else 256)

    def prefill_alone_step_ms_on(self, device: str) -> float:
        """The longest prefill step while no short prompt waits, on a device type, `cuda` or `cpu`. A step of
        a CPU keeps its worker's other work waiting."""
        unset = 1e3 * ALONE_STEP_S if device == "cuda" else self.prefill_step_ms
        return max(self.prefill_step_ms, self.prefill_alone_step_ms or unset)

    def with_gpu_links(
        self, role: Role, prefill: int, decode: int, transfer: TransferConfig, both: int = 0
    ) -> EngineConfig:
        """The configuration for a worker among so many prefill, decode and combined workers: where
        `gpu_links` is unset, it becomes the number of its peers whose links need GPU memory at this end."""
        if self.gpu_links is not None:
            return self
        # Only NCCL needs staging memory at the sender; otherwise its blocks are copied from where they are.
        exchange = both if transfer.both_receives else 0
        sent_to = decode + exchange if transfer.transport == "nccl" else 0
        others = max(0, exchange - 1)
        combined = prefill + others + max(0, sent_to - 1) if transfer.both_receives else 0
        peers = {"prefill": sent_to, "decode": prefill + exchange, "both": combined}[role]
        return self.model_copy(update={"gpu_links": 0 if transfer.through_host else peers})


class TransferConfig(StrictModel):
    """Links between workers."""

    transport: Transport = Field(
        "auto",
        description="ipc: within one host, nccl: between GPUs, grpc: anywhere; auto: ipc where both "
        "workers can use it, else grpc",
    )
    kv_wire: KVWire = Field(
        "native",
        description="wire quantization of KV: native: none, fp8 and int8: eight bits an element with a "
        "scale for each token and head, which halves the bytes of 16-bit KV and loses some "
        "precision; quantized KV is sent through host memory",
    )
    piece_bytes: int = Field(1024 * 1024, ge=4096, le=1024 * 1024)
    window_pieces: int = Field(32, ge=2, le=65536, description="staging pieces of a link at its receiver")
    max_links: int = Field(
        256,
        ge=1,
        le=4096,
        description="senders that a decode worker has links with at once; beyond 64 the staging window of a "
        "link in host memory is an eighth of window_pieces",
    )
    peer_timeout_s: float = Field(10.0, gt=0, description="longest wait for a peer's answer")
    transfer_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="where a decode worker listens for links over grpc or nccl; 0: any free port. The "
        "first worker of `baton up` gets this port, each further one the next",
    )
    frames_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="where a decode worker listens for the frames of nccl links; 0: any free port; "
        "further workers as above",
    )

    both_receives: bool = Field(
        False,
        description="workers of role both exchange sequences with others: one may prefill what another "
        "decodes, as the router chooses for each request",
    )

    def of_worker(self, index: int) -> TransferConfig:
        """The configuration of the `index`-th of several workers, whose ports are higher by `index`."""
        ports = {"transfer_port": self.transfer_port, "frames_port": self.frames_port}
        return self.model_copy(update={name: port and port + index for name, port in ports.items()})

    @property
    def through_host(self) -> bool:
        """Whether blocks are always sent through host memory, even where they are on GPUs."""
        return self.transport == "grpc" or self.kv_wire != "native"

    @model_validator(mode="after")
    def _quantized_is_sent_through_the_host(self) -> TransferConfig:
        if self.kv_wire != "native" and self.transport == "nccl":
            raise ValueError(f"kv_wire {self.kv_wire} is sent through the host, transport nccl is not")
        return self


def check_quantised_once(engine: EngineConfig, transfer: TransferConfig) -> None:
    """Raises ValueError where both the cache and what is sent of it would be quantised."""
    if engine.kv_dtype == "fp8" and transfer.kv_wire != "native":
        raise ValueError(
            f"kv_wire {transfer.kv_wire} is for a cache that kv_dtype fp8 does not quantise already"
        )


class WorkerConfig(StrictModel):
    """One worker: a gRPC front process and one engine process."""

    # It names a folder of the disk cache, and begins with a letter or digit so that it is no path such as
    # "..".
    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
    role: Role
    model: str
    cluster_id: str = Field("", description="the cluster within which its name is unique")
    host: str = Field("127.0.0.1", description="address that others reach it at")
    listen_host: str | None = Field(
        None, description="address that its ports are bound to, such as `::` for all; unset: host"
    )
    port: int = Field(0, ge=0, le=65535, description="0: any free port, reported when ready")
    metrics_port: int | None = Field(0, ge=0, le=65535, description="0: any free port; null: no metrics")
    served_model_name: str | None = Field(
        None,
        description="the model's name in the API; a router uses only workers with its own name; unset: "
        "the folder's name",
    )
    restarts: int = Field(0, ge=0, description="how often its supervisor has restarted this worker")
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    state: StateConfig | None = Field(None, description="unset: the worker is not registered")
    prefix_secret: str = Field("", repr=False, description="keys the hashes of cached blocks; unset: random")
    cluster_secret: str = ClusterSecret
    tls: InternalTls | None = Field(None, description="unset: plaintext gRPC")
    require_tls: bool = Field(False, description="refuse to start where a port would be plaintext")
    admin_http_port: int | None = Field(
        None, ge=0, le=65535, description="port of /health, /ready and /metrics; unset: none"
    )
    tracing: TracingSettings = TracingSettings()
    group: str = Field("", description="workers of one pod share it; routers prefer pairs of one group")
    start_timeout_s: float = Field(1800.0, gt=0, description="longest time to load the model")
    canary: bool = Field(
        False,
        description="run a short generation every 10 s in which no request finishes; readiness depends on it",
    )
    drain_s: float = Field(DRAIN_S, ge=0, description="how long running requests may go on at a stop")
    log_level: LogLevel = "info"

    @model_validator(mode="after")
    def _quantised_once(self) -> WorkerConfig:
        check_quantised_once(self.engine, self.transfer)
        return self

    @property
    def bound_host(self) -> str:
        """The address that its ports are bound to."""
        return self.listen_host or self.host

    @property
    def receives_handoffs(self) -> bool:
        """Whether it decodes sequences that other workers have prefilled."""
        return self.role == "decode" or (self.role == "both" and self.transfer.both_receives)

    @property
    def served_name(self) -> str:
        """The name of the model in the API."""
        return self.served_model_name or Path(self.model).name

    def at_place(self, place: int) -> WorkerConfig:
        """The worker as the `place`-th of its host, counted from 0 over both roles: each configured port is
        higher by `place`."""
        ports = {"port": self.port, "metrics_port": self.metrics_port}
        moved: dict[str, object] = {name: port and port + place for name, port in ports.items()}
        return self.model_copy(update={**moved, "transfer": self.transfer.of_worker(place)})

    def on_gpu(self, index: int | None, workers: int) -> WorkerConfig:
        """The worker placed on a GPU of its host, which `workers` share unless the configuration states
        a number."""
        engine = self.engine
        placed = {"device_index": index, "gpu_workers": engine.gpu_workers or workers}
        return self.model_copy(update={"engine": engine.model_copy(update=placed)})
