"""Loads a worker's model onto its device and allocates its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.base.errors import BatonError, ErrorKind
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.checkpoint import checkpoint_digest
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.source import resolve_model
from baton.engine.model.weight_formats import format_name, weight_formats
from baton.engine.model.weights import load_weights, random_digest, random_weights, weight_bytes
from baton.engine.shared_memory.output_ring import MAX_VOCAB
from baton.model_spec.layout import FP8, Layout
from baton.model_spec.model_files import TokenizerFiles
from services.common.config.worker import EngineConfig
from services.worker.engine.startup.loading_progress import LoadingProgress
from services.worker.engine.startup.memory_plan import Gpu, MemoryPlanner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, its KV cache, and the pools of the cache's blocks."""

    config: ModelConfig
    decoder: Model
    cache: KVCache
    pools: BlockPools
    slots: int
    max_context_tokens: int
    max_logprobs: int
    device: torch.device
    # Equal where two workers may exchange KV blocks: a digest of source checkpoint and layout.
    fingerprint: bytes
    exact: bool
    # SHA-256 of the source checkpoint, and of the tokenizer's files.
    checkpoint: bytes
    tokenizer: bytes
    # The dtype of its weights, such as bfloat16, or the names of the formats of those in fewer bits.
    weight_format: str

    @property
    def layout(self) -> Layout:
        return self.pools.layout


def load(model: str, engine: EngineConfig) -> LoadedModel:
    """Loads a model. Raises BatonError(INVALID) where it cannot run here."""
    folder = resolve_model(model)
    config = load_config(folder)
    if config.vocab_size > MAX_VOCAB:
        raise BatonError(ErrorKind.INVALID, f"a vocabulary of {config.vocab_size} exceeds {MAX_VOCAB}")
    device = device_of(engine)
    dtype_name = _dtype_name(engine.dtype, config, device)
    dtype = getattr(torch, dtype_name)
    cache_name = FP8 if engine.kv_dtype == "fp8" else dtype_name
    layout = config.layout(engine.block_tokens_on(device.type), cache_name)
    max_context = min(
        engine.max_context_tokens or config.max_position_embeddings, config.max_position_embeddings
    )
    config = config.for_context(max_context)
    formats = weight_formats(config, engine.quantization, quantize_head=engine.quantize_head)
    if device.type == "cuda":  # Triton is a tenth of what an engine imports
        from services.worker.engine.startup.kernel_tuning import tune_products

        tune_products(config, engine, device, dtype, formats)
    weights_need = weight_bytes(config, dtype, formats)
    plan = MemoryPlanner(config, engine, layout, max_context, weights_need, _gpu(device)).plan()
    with LoadingProgress() as progress:
        if engine.weights == "random":
            weights = random_weights(config, engine.weights_seed, device, dtype, progress, formats)
            checkpoint = random_digest(config, engine.weights_seed)
        else:
            weights = load_weights(config, folder, device, dtype, progress, formats)
            checkpoint = checkpoint_digest(config, folder)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # buffers of loading are free for KV blocks
    return LoadedModel(
        config=config,
        decoder=Model(config, weights, layout, device, Precision.of(dtype, getattr(torch, cache_name))),
        cache=KVCache(layout, plan.kv_blocks, device),
        pools=BlockPools(layout, [plan.kv_blocks] * len(layout.groups)),
        slots=plan.slots,
        max_context_tokens=max_context,
        max_logprobs=engine.max_logprobs,
        device=device,
        fingerprint=layout.fingerprint(checkpoint),
        exact=engine.numerics == "exact" or (engine.numerics == "auto" and device.type == "cpu"),
        checkpoint=checkpoint,
        tokenizer=TokenizerFiles.read(folder).digest,
        weight_format=format_name(formats, dtype_name),
    )


def device_of(engine: EngineConfig) -> torch.device:
    """The configured device. Raises BatonError(INVALID) where this machine has no such device."""
    name, index = engine.device, engine.device_index
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BatonError(ErrorKind.INVALID, "device cuda is configured and torch finds none")
    if name == "cpu":
        return torch.device(name)
    if index is not None and index >= torch.cuda.device_count():
        raise BatonError(
            ErrorKind.INVALID, f"there is no GPU {index}: torch finds {torch.cuda.device_count()}"
        )
    return torch.device(name, index or 0)


def _dtype_name(name: str, config: ModelConfig, device: torch.device) -> str:
    if name != "auto":
        return name
    return config.dtype if device.type == "cuda" else "float32"


def _gpu(device: torch.device) -> Gpu | None:
    """The memory of a GPU, which becomes this thread's current device; None for a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(f"GPU {device.index}", total, free)
