"""Configuration of a worker: its engine, its links, and itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from baton.base.prefill_defaults import AGE_CAP_S, ALONE_STEP_S, STEP_S
from services.common.config.state import StateConfig
from services.common.config.tls import InternalTls
from services.common.config.tracing import TracingSettings
from services.common.config.transfer import TransferConfig, check_quantised_once
from services.common.config.types import DRAIN_S, ClusterSecret, LogLevel, Role, StrictModel, fixed, setting

Device = Literal["auto", "cpu", "cuda"]
_DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _dtype_name(value: object) -> object:
    return _DTYPE_SPELLINGS.get(value, value) if isinstance(value, str) else value


DType = Annotated[Literal["auto", "bfloat16", "float16", "float32", "float64"], BeforeValidator(_dtype_name)]
KVDType = Literal["auto", "fp8"]
Numerics = Literal["auto", "exact", "fast"]
Weights = Literal["file", "random"]
Quantization = Literal["fp8", "int8", "int4"]
Speculation = Literal["off", "lookup", "table", "auto"]

# Default slots of a decode worker: on a CPU, and the most on a GPU.
CPU_SLOTS, MOST_DEFAULT_SLOTS = 16, 256
# As in `baton.engine.shared_memory.step_shape`, which the cluster process does not import.
MOST_DRAFTS = 7
# Memory of the lookahead table of a worker whose drafts come from nowhere else.
_TABLE_MB = 64


class EngineConfig(StrictModel):
    """Configuration of an engine process, of any role."""

    device: Device = setting(
        "auto", "where the model runs: cpu, or cuda (a GPU); auto: on a GPU where there is one", flag=True
    )
    device_indexes: tuple[int, ...] = fixed(
        (), "workers take GPUs in turn; CUDA_VISIBLE_DEVICES names those they may use"
    )
    dtype: DType = setting(
        "auto",
        "format of weights and KV cache, also `bf16`, `fp16`, `fp32`, `fp64`; auto: the checkpoint's on a "
        "GPU, float32 on a CPU",
        flag=True,
    )
    kv_dtype: KVDType = setting(
        "auto",
        "number format of the KV cache; auto: as `engine.dtype`; fp8: e4m3 with a scale for each token and "
        "head, in half the memory of 16 bits ([0023](decisions/0023-a-cache-of-eight-bits.md)). The same on "
        "all workers of a pool, and not together with `transfer.kv_wire`",
        flag=True,
    )
    numerics: Numerics = setting(
        "auto",
        "exact: the tokens of a request never depend on the other requests of its batch; fast: they may, in "
        "their last bits, and steps are shorter; auto: exact on a CPU, fast on a GPU",
        who="experts",
        flag=True,
    )
    quantization: Quantization | None = setting(
        None,
        "[quantise](quantization.md) the weights of the layers while they are loaded: fp8 (e4m3) or int8 by "
        "rows, int4 by groups of 128 columns; unset: as the checkpoint stores them",
        who="everyone",
        flag=True,
    )
    quantize_head: bool = setting(
        False,
        "quantise the last layer (`lm_head`) too, or a copy of it where the embedding is the same tensor",
        who="experts",
        flag=True,
    )
    weights: Weights = setting(
        "file",
        "file: those of the checkpoint; random: from a fixed seed, for load tests; needs `config.json` alone",
        who="experts",
        flag=True,
    )
    weights_seed: int = fixed(0, "random weights have seed 0, as they must be the same on every worker")
    kernel_cache: str | None = setting(
        None,
        "folder of compiled GPU kernels; unset: `$TRITON_CACHE_DIR`, else `~/.triton/cache`",
        unit="path",
        flag=True,
    )
    tune: Literal["auto", "off", "full"] = setting(
        "auto",
        "measure at the start which kernels are fastest for the model's matrix products; auto: shapes that "
        "no table has, for up to 60 s, kept with compiled kernels; off: never; full: all, however long it "
        "takes",
        flag=True,
    )
    tensor_parallel: PositiveInt = setting(
        1,
        "devices of a worker, which divide every layer's heads and inner width among them "
        "([0078](decisions/0078-ranks-are-devices.md)); must divide the model's KV heads. GPUs "
        "are of one host and need peer access to each other",
        unit="devices",
        who="experts",
        flag=True,
    )
    exchange_deadline_s: PositiveFloat = setting(
        2.0,
        "longest that one of a worker's GPUs waits for another within a step; then the worker ends, and its "
        "requests go on elsewhere ([0082](decisions/0082-waits-between-devices-end.md))",
        who="experts",
        le=60,
    )
    block_tokens: int | None = setting(
        None, "tokens of a KV block; unset: 64 on a GPU, 16 on a CPU", who="experts", flag=True, ge=1, le=1024
    )
    gpu_memory: float = setting(
        0.9,
        "share of a GPU's memory for all its workers; less where other programs need some of it",
        who="everyone",
        unit="0 to 1",
        flag=True,
        gt=0,
        le=1,
    )
    gpu_workers: PositiveInt | None = setting(
        None, "workers that may share a GPU; unset: one, or all on a machine with one GPU", flag=True
    )
    gpu_links: NonNegativeInt | None = setting(
        None,
        "links with other workers that GPU memory is reserved for, up to 256 MiB each; further ones use "
        "memory that is left, or go through the host; unset: one with each worker that hands sequences over "
        "to it, with nccl also with each that it hands over to, where this command starts them all, else 1",
        who="experts",
    )
    kv_memory_mb: PositiveInt | None = setting(
        None, "memory for KV blocks; unset: 512 on a CPU, on a GPU what is left of `engine.gpu_memory`"
    )
    kv_blocks: int | None = setting(
        None,
        "KV blocks of each cache group; unset: as many as their memory holds",
        who="experts",
        flag=True,
        ge=2,
    )
    slots: int | None = setting(
        None,
        "sequences that a decode worker generates at once; unset: 16 on a CPU, on a GPU as many of 1,024 "
        "tokens (or of the whole context, where that is shorter) as its KV blocks hold, from 16 to 256",
        flag=True,
        ge=1,
        le=4096,
    )
    speculation: Speculation = setting(
        "off",
        "guess the next tokens of an output, so that one decode step may give several; in mode `exact` the "
        "tokens are the same either way. lookup: by looking the last ones up in the sequence's own text and "
        "in the request's `prediction` "
        "([0073](decisions/0073-drafts-are-accepted-by-the-engines-own-draw.md)); auto: there and in the "
        "tenant's earlier outputs, as far as right guesses pay for what guesses cost; table: by what "
        "followed them in the tenant's earlier outputs alone, for measurements; off: one token a step",
        flag=True,
    )
    draft_tokens: int = setting(
        MOST_DRAFTS,
        "most tokens that are guessed for a sequence in one step, where `engine.speculation` is on",
        who="experts",
        ge=1,
        le=MOST_DRAFTS,
    )
    lookup_tokens: int = setting(
        32_768,
        "latest tokens of a sequence that guesses are looked up in, its prediction included; 4 bytes each on "
        "the device, for every slot",
        who="experts",
        ge=64,
        le=1 << 20,
    )
    lookahead_table_mb: NonNegativeInt | None = setting(
        None,
        "device memory of a table of how a tenant's earlier outputs went on, which guesses are looked up in "
        "too, where `engine.speculation` is on ([0080](decisions/0080-a-table-of-outputs-by-tenant.md)); 0: "
        f"none; unset: {_TABLE_MB} with `auto` and `table`, else none",
        who="experts",
    )
    chunk_tokens: PositiveInt | None = setting(
        None,
        "most prompt tokens of one prefill step; unset: 256 on a CPU; on a GPU 2048, and up to 8192 for "
        "mixtures of experts where memory allows, since few tokens read nearly all experts too",
        who="experts",
        flag=True,
    )
    prefill_step_ms: PositiveFloat = setting(
        1e3 * STEP_S,
        "target of a prefill step while short prompts wait or have come within a second; longer steps "
        "compute more tokens a second, shorter ones let short prompts pass",
        who="experts",
    )
    prefill_alone_step_ms: float | None = fixed(
        None, f"it is {1e3 * ALONE_STEP_S:g} on a GPU, prefill_step_ms on a CPU: a step has a fixed cost"
    )
    tpot_slo_ms: PositiveFloat | None = setting(
        None,
        "role `both`: prefill steps are paced so that decode steps take no longer than this on average, as "
        "far as that leaves prompts an eighth of the time; unset: only by the [latencies that requests "
        "state](api.md#service-level-objectives)",
        who="experts",
        flag=True,
    )
    prefill_age_cap_ms: float = fixed(
        1e3 * AGE_CAP_S, f"it is {1e3 * AGE_CAP_S:g}: no prompt waits for all others"
    )
    prefill_graphs: bool = fixed(
        True,
        "steps of up to 1,024 rows on a GPU are CUDA graphs, of up to 2,048 on several that only compute "
        "prompts; others are launched",
    )
    mixed_steps: bool = setting(
        True,
        "role `both`, on a GPU: run a [decode step as part of each prefill "
        "step](decisions/0044-decode-steps-in-prefill-steps.md), so that both read the weights once, unless "
        "requests use more than greedy or temperature sampling",
        who="experts",
        flag=True,
    )
    max_context_tokens: int | None = setting(
        None,
        "longest prompt and output together; unset: the model's own limit",
        who="everyone",
        flag=True,
        ge=2,
    )
    max_logprobs: int = setting(
        20, "alternatives for a token that a request may ask logprobs of; 0: no logprobs", ge=0, le=20
    )
    host_kv_mb: NonNegativeInt = setting(
        512, "host memory for KV of swapped-out sequences; 0: they are preempted, and computed again"
    )
    reserve_output_tokens: PositiveInt | None = fixed(
        None, "KV blocks are reserved for as many output tokens as nine of ten recent requests needed"
    )
    prefix_cache: bool = setting(True, "reuse the KV blocks of prompts that begin alike", who="experts")
    prefix_host_mb: NonNegativeInt = setting(
        0, "host memory for cached blocks that were evicted from the device; 0: none"
    )
    prefix_disk_dir: str | None = setting(
        None,
        "folder for cached blocks evicted from host memory (`engine.prefix_host_mb`); unset: none",
        unit="path",
    )
    prefix_disk_mb: PositiveInt = setting(4096, "disk space in that folder, for each worker")
    prefill_queue: int = fixed(256, "it is 256: routers send fewer, so it only bounds memory")

    @model_validator(mode="after")
    def _settings_agree(self) -> EngineConfig:
        if self.prefix_disk_dir is not None and not self.prefix_host_mb:
            raise ValueError("prefix_disk_dir needs prefix_host_mb: blocks on disk pass through host memory")
        if self.quantize_head and self.quantization is None:
            raise ValueError("quantize_head needs quantization: it says how")
        if self.speculation == "table" and self.lookahead_table_mb == 0:
            raise ValueError("speculation by table needs lookahead_table_mb: guesses come from nowhere else")
        if self.tensor_parallel > 1 and self.quantization not in (None, "fp8"):
            devices = f"tensor_parallel {self.tensor_parallel}"
            raise ValueError(f"{devices} needs quantization fp8 or none so far, not {self.quantization}")
        return self

    @property
    def most_slots(self) -> int:
        """An upper bound of the slots that is known before the engine knows its device and memory; it sizes
        the memory that a worker's two processes share."""
        return self.slots or MOST_DEFAULT_SLOTS

    @property
    def rows_per_slot(self) -> int:
        """Rows that a sequence may have in a decode step: one, and its drafts."""
        return 1 if self.speculation == "off" else 1 + self.draft_tokens

    def history_tokens(self, max_context: int) -> int:
        """Tokens of each slot's history, of sequences of up to `max_context` tokens; 0: there is none."""
        return 0 if self.speculation == "off" else min(self.lookup_tokens, max_context)

    @property
    def lookahead_table_bytes(self) -> int:
        """Device memory of the lookahead table; 0: there is none."""
        unset = _TABLE_MB if self.speculation in ("auto", "table") else 0
        megabytes = unset if self.lookahead_table_mb is None else self.lookahead_table_mb
        return 0 if self.speculation == "off" else megabytes * 10**6

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
        """Returns the configuration for a worker among `prefill`, `decode` and `both` (combined) workers:
        where `gpu_links` is unset, it becomes the number of its peers whose links need GPU memory at this
        end."""
        if self.gpu_links is not None:
            return self
        # Only NCCL needs staging memory at the sender; otherwise its blocks are copied from where they are.
        exchange = both if transfer.both_receives else 0
        sent_to = decode + exchange if transfer.transport == "nccl" else 0
        others = max(0, exchange - 1)
        combined = prefill + others + max(0, sent_to - 1) if transfer.both_receives else 0
        peers = {"prefill": sent_to, "decode": prefill + exchange, "both": combined}[role]
        return self.model_copy(update={"gpu_links": 0 if transfer.through_host else peers})


class WorkerConfig(StrictModel):
    """One worker: a gRPC front process and one engine process."""

    # It names a folder of the disk cache, and begins with a letter or digit so that it is no path such as
    # "..".
    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
    role: Role
    model: str
    cluster_id: str = Field("", description="the cluster within which its name is unique")
    host: str = Field("127.0.0.1", description="address that others reach it at")
    listen_host: str | None = Field(None, description="address that its ports are bound to; unset: host")
    port: int = Field(0, ge=0, le=65535, description="0: any free port, reported when ready")
    metrics_port: int | None = Field(0, ge=0, le=65535, description="0: any free port; null: no metrics")
    served_model_name: str | None = Field(
        None,
        description="the model's name in the API; a router uses only workers with its own name; unset: "
        "the folder's name",
    )
    restarts: int = Field(0, ge=0, description="how often its supervisor has restarted this worker")
    exchange_timeouts: int = Field(0, ge=0, description="how often it ended since a device waited in vain")
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
    def _settings_agree(self) -> WorkerConfig:
        check_quantised_once(self.engine.kv_dtype, self.transfer)
        devices, drafts = self.engine.tensor_parallel, self.engine.speculation
        if self.role != "prefill" and devices > 1 and drafts != "off":
            why = f"needs speculation off so far in workers of role {self.role}, not {drafts}"
            raise ValueError(f"tensor_parallel {devices} {why}")
        return self

    @property
    def bound_host(self) -> str:
        """The address that its ports are bound to."""
        return self.listen_host or self.host

    @property
    def receives_handoffs(self) -> bool:
        """True if the worker decodes sequences that other workers have prefilled."""
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

    def on_gpus(self, indexes: tuple[int, ...], workers: int) -> WorkerConfig:
        """The worker placed on GPUs of its host, each of which `workers` share unless the configuration
        states a number. `indexes` is empty where the host's GPUs are not known."""
        engine = self.engine
        placed = {"device_indexes": indexes, "gpu_workers": engine.gpu_workers or workers}
        return self.model_copy(update={"engine": engine.model_copy(update=placed)})
