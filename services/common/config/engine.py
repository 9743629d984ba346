"""Configuration of the engine process."""

from __future__ import annotations

from pydantic import Field, model_validator

from services.common.config.strict_model import StrictModel
from services.common.config.types import Device, DType, Numerics, Weights

# Default slots of a decode worker: on a CPU, and the most on a GPU.
CPU_SLOTS, MOST_DEFAULT_SLOTS = 16, 256


class EngineConfig(StrictModel):
    """Configuration of an engine process, of any role."""

    device: Device = "auto"
    device_index: int | None = Field(None, ge=0)
    """Index among the GPUs that CUDA shows; unset: round robin, the first for a single worker."""
    dtype: DType = "auto"
    numerics: Numerics = "auto"
    weights: Weights = "file"
    weights_seed: int = Field(0, ge=0)
    """Seed of --weights random, the same on every worker."""
    kernel_cache: str | None = None
    """Folder of compiled kernels; unset: $TRITON_CACHE_DIR, else ~/.triton/cache."""
    block_tokens: int | None = Field(None, ge=1, le=1024)
    """Tokens of a KV block; unset: 64 on a GPU, 16 on a CPU."""
    gpu_memory: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that its workers use together, in equal parts."""
    gpu_workers: int | None = Field(None, ge=1)
    """Most workers that share a GPU; unset: one, or all of them where there is one GPU."""
    gpu_links: int | None = Field(None, ge=0)
    """Links to other workers that GPU memory is reserved for, up to 256 MiB each; unset: one to each worker
    that hands sequences over to it, with NCCL also to each that it hands over to."""
    kv_memory_mb: int | None = Field(None, ge=1)
    """Memory for KV blocks; unset: 512 on a CPU, on a GPU what gpu_memory leaves."""
    kv_blocks: int | None = Field(None, ge=2)
    """KV blocks of each cache group; unset: by memory."""
    slots: int | None = Field(None, ge=1, le=4096)
    """Most concurrent sequences of a decode worker; unset: 16 on a CPU, on a GPU as many of 1,024 tokens as
    its KV blocks have room for, from 16 to 256."""
    chunk_tokens: int | None = Field(None, ge=1)
    """Most prompt tokens of a prefill step; unset: 256, on a GPU 2048."""
    prefill_step_ms: float = Field(25.0, gt=0)
    """Longest expected duration of a prefill step; while others arrive, a prompt that needs several steps
    gets half of each."""
    prefill_age_cap_ms: float = Field(2000.0, ge=0)
    """A prompt that has waited so long gets at least an eighth of the steps' time."""
    prefill_graphs: bool = True
    """Run prefill steps of up to 1,024 rows as CUDA graphs on a GPU."""
    max_context_tokens: int | None = Field(None, ge=2)
    """Unset: the model's own."""
    max_logprobs: int = Field(20, ge=0, le=20)
    """Most top logprobs that a request may ask for; 0: no logprobs."""
    host_kv_mb: int = Field(512, ge=0)
    """Host memory for KV blocks of swapped-out sequences; 0: sequences are preempted instead."""
    reserve_output_tokens: int | None = Field(None, ge=1)
    """Output tokens to reserve KV blocks for; more are allocated as the sequence grows; unset: the 90th
    percentile of recent output lengths."""
    prefix_cache: bool = True
    """Reuse the KV blocks of common prompt prefixes."""
    prefix_host_mb: int = Field(0, ge=0)
    """Host memory for cached blocks that are evicted from the device; 0: none."""
    prefix_disk_dir: str | None = None
    """Folder for cached blocks that are evicted from host memory; unset: none."""
    prefix_disk_mb: int = Field(4096, ge=1)
    """Disk space for them, for each worker."""
    prefill_queue: int = Field(256, ge=1)
    """Most prefills of a worker, queued or running."""

    @model_validator(mode="after")
    def _disk_is_behind_the_host(self) -> EngineConfig:
        if self.prefix_disk_dir is not None and not self.prefix_host_mb:
            raise ValueError("prefix_disk_dir needs prefix_host_mb: blocks on disk pass through host memory")
        return self

    @property
    def most_slots(self) -> int:
        """An upper bound of the slots that is known before the engine knows its device and memory; it sizes
        the memory that a worker's two processes share."""
        return self.slots or MOST_DEFAULT_SLOTS

    def block_tokens_on(self, device: str) -> int:
        """Tokens of a KV block on a device type, `cuda` or `cpu`."""
        return self.block_tokens or (64 if device == "cuda" else 16)

    def chunk_tokens_on(self, device: str) -> int:
        """Most tokens of a prefill step on a device type, `cuda` or `cpu`."""
        return self.chunk_tokens or (2048 if device == "cuda" else 256)
