"""Configuration of the engine process."""

from __future__ import annotations

from pydantic import Field, model_validator

from services.common.config.strict_model import StrictModel
from services.common.config.types import Device, DType, Numerics, Weights

# Slots of a decode worker where none are configured: on a CPU, and the most on a GPU.
CPU_SLOTS, MOST_DEFAULT_SLOTS = 16, 256


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
