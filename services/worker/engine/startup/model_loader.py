"""Loads a worker's model onto its device and allocates its KV cache."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.base.errors import BatonError, ErrorKind
from baton.device.kernel_loading import load_kernels
from baton.engine.kernels.weight_format import FORMATS, WeightFormat
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.kv_cache import BlockMemory, KVCache
from baton.engine.memory.split_cache import SplitKVCache
from baton.engine.model.checkpoint import checkpoint_digest
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.source import resolve_model
from baton.engine.model.split_checks import check_split
from baton.engine.model.weight_formats import format_name, weight_formats
from baton.engine.model.weights import load_ranks, random_digest, random_ranks, weight_bytes
from baton.engine.shared_memory.output_ring import MAX_VOCAB
from baton.model_spec.layout import FP8, Layout
from baton.model_spec.model_files import TokenizerFiles
from baton.model_spec.split import splits
from services.common.config.worker import EngineConfig
from services.common.observability.logs import get_log
from services.worker.engine.startup.host_memory import check_installed
from services.worker.engine.startup.loading_progress import LoadingProgress
from services.worker.engine.startup.memory_plan import Gpu, MemoryPlanner, plan_devices

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, its KV cache, and the pools of the cache's blocks."""

    config: ModelConfig
    # Its part on each of the worker's devices.
    ranks: tuple[Model, ...]
    cache: BlockMemory
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
    # Most prompt tokens of a prefill step.
    chunk_tokens: int
    # Rows that a slot may have in a decode step.
    rows_per_slot: int = 1
    # Memory that loading all kernels at once has taken of each device; empty: each is loaded when it is first
    # launched.
    kernel_bytes: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        return self.pools.layout


def load(model: str, engine: EngineConfig) -> LoadedModel:
    """Loads a model. Raises BatonError(INVALID) where it cannot run here."""
    folder = resolve_model(model)
    config = load_config(folder)
    if config.vocab_size > MAX_VOCAB:
        raise BatonError(ErrorKind.INVALID, f"a vocabulary of {config.vocab_size} exceeds {MAX_VOCAB}")
    devices = devices_of(engine)
    device = devices[0]
    dtype_name = _dtype_name(engine.dtype, config, device)
    dtype = getattr(torch, dtype_name)
    cache_name = FP8 if engine.kv_dtype == "fp8" else dtype_name
    block_tokens = engine.block_tokens_on(device.type)
    layout = config.layout(block_tokens, cache_name)
    max_context = min(
        engine.max_context_tokens or config.max_position_embeddings, config.max_position_embeddings
    )
    config = config.for_context(max_context)
    formats = weight_formats(config, engine.quantization, quantize_head=engine.quantize_head)
    check_split(config, formats, engine.tensor_parallel)
    kernel_bytes = (0,) * len(devices)
    if device.type == "cuda" and len(devices) > 1:
        _refuse_on_several_gpus(len(devices), dtype_name)
        kernel_bytes = _load_kernels(devices, alone=(engine.gpu_workers or 1) == 1)
    if device.type == "cuda" and config.experts is not None:
        _refuse_experts(folder, config.experts.count, formats)
    # A CPU has the ranks' memory in one.
    planned = [config] if device.type == "cpu" else [config.of_rank(split) for split in splits(len(devices))]
    if device.type == "cuda":  # Triton is a tenth of what an engine imports
        from services.worker.engine.startup.kernel_tuning import tune_products

        tune_products(planned[0], engine, device, dtype, formats)
    planners = []
    for one, place, kernels in zip(planned, devices, kernel_bytes, strict=False):
        gpu = _gpu(place)
        smaller = {} if gpu is None else quantized_bytes(one, engine, dtype)
        need, blocks = weight_bytes(one, dtype, formats), one.layout(block_tokens, cache_name)
        planners.append(MemoryPlanner(one, engine, blocks, max_context, need, gpu, smaller, kernels))
    plan = plan_devices(planners)
    if device.type == "cpu":
        setting = "kv_memory_mb" if engine.kv_blocks is None else "kv_blocks"
        check_installed(setting, plan.kv_blocks * sum(group.block_bytes for group in layout.groups))
    with LoadingProgress() as progress:
        if engine.weights == "random":
            weights = random_ranks(config, engine.weights_seed, devices, dtype, progress, formats)
            checkpoint = random_digest(config, engine.weights_seed)
        else:
            weights = load_ranks(config, folder, devices, dtype, progress, formats)
            checkpoint = checkpoint_digest(config, folder)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each has been the current one
        torch.cuda.empty_cache()  # buffers of loading are free for KV blocks
    precision = Precision.of(dtype, getattr(torch, cache_name))
    parts = [config.of_rank(split) for split in splits(len(devices))]
    ranks = tuple(
        Model(part, mine, part.layout(block_tokens, cache_name), place, precision)
        for part, mine, place in zip(parts, weights, devices, strict=True)
    )
    caches = [KVCache(rank.layout, plan.kv_blocks, rank.device) for rank in ranks]
    return LoadedModel(
        config=config,
        ranks=ranks,
        cache=caches[0] if len(caches) == 1 else SplitKVCache(layout, caches),
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
        chunk_tokens=plan.chunk_tokens,
        rows_per_slot=plan.rows_per_slot,
        kernel_bytes=kernel_bytes if any(kernel_bytes) else (),
    )


def _refuse_experts(folder: Path, count: int, formats: Mapping[str, WeightFormat]) -> None:
    """Raises BatonError(INVALID) for a mixture of experts that no kernel of a GPU computes."""
    from baton.engine.kernels.gpu.experts.grouped_codes import grouped_codes_fit

    for key, form in formats.items():
        if ".experts." in key and not grouped_codes_fit(form):
            why = f"{key}: experts in {form.name} are served with device cpu alone"
            raise BatonError(ErrorKind.INVALID, f"{folder / 'config.json'}: {why}")


def _load_kernels(devices: Sequence[torch.device], *, alone: bool) -> tuple[int, ...]:
    """Loads all kernels onto each of several GPUs, before anything else is done there, and logs what that
    took; bytes on each, or 0 where the worker is not alone on them: others may allocate meanwhile. The first
    GPU's bytes count for all: on the others kernels are loaded with the context, and not measured apart."""
    taken: list[int] = []
    for device in devices:
        loaded = load_kernels(device.index)
        taken.append((taken[0] if taken else loaded.bytes) if alone else 0)
        memory = {"gb": round(taken[0] / 1e9, 3)} if alone else {}
        log.info("kernels_loaded", gpu=device.index, seconds=round(loaded.seconds, 2), **memory)
    return tuple(taken)


def _refuse_on_several_gpus(count: int, dtype_name: str) -> None:
    """Raises BatonError(INVALID) for what only a CPU's ranks compute so far."""
    if dtype_name not in ("bfloat16", "float32"):
        why = f"GPUs exchange bfloat16 and float32, not {dtype_name}; dtype bfloat16 would work"
        raise BatonError(ErrorKind.INVALID, f"tensor_parallel {count}: {why}")


def devices_of(engine: EngineConfig) -> list[torch.device]:
    """The configured devices, one a rank: a CPU is that of all. Raises BatonError(INVALID) where this machine
    has no such device, or fewer than are needed."""
    first, count = device_of(engine), engine.tensor_parallel
    if first.type == "cpu":
        return [first] * count
    indexes = engine.device_indexes or tuple(range(count))
    there = torch.cuda.device_count()
    if len(set(indexes)) != count:
        why = f"device_indexes are {list(indexes)}, which are not {count} GPUs"
    elif count > there:
        why = f"GPUs that torch finds: {there}, enough for tensor_parallel {there}"
    else:
        return [torch.device(first.type, index) for index in indexes]
    raise BatonError(ErrorKind.INVALID, f"tensor_parallel {count}: {why}")


def device_of(engine: EngineConfig) -> torch.device:
    """The configured device, the first one of several. Raises BatonError(INVALID) where this machine has no
    such device."""
    name = engine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BatonError(ErrorKind.INVALID, "device cuda is configured and torch finds none")
    if name == "cpu":
        return torch.device(name)
    for index in engine.device_indexes:
        if index >= torch.cuda.device_count():
            raise BatonError(
                ErrorKind.INVALID, f"there is no GPU {index}: torch finds {torch.cuda.device_count()}"
            )
    return torch.device(name, engine.device_indexes[0] if engine.device_indexes else 0)


def _dtype_name(name: str, config: ModelConfig, device: torch.device) -> str:
    if name != "auto":
        return name
    return config.dtype if device.type == "cuda" else "float32"


def quantized_bytes(config: ModelConfig, engine: EngineConfig, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the weights by each quantisation that this model could be loaded with."""
    found: dict[str, int] = {}
    if config.quantization is None and engine.quantization is None:
        for name in FORMATS:
            with contextlib.suppress(BatonError):
                found[name] = weight_bytes(config, dtype, weight_formats(config, name))
    return found


def _gpu(device: torch.device) -> Gpu | None:
    """The memory of a GPU, which becomes this thread's current device; None for a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(f"GPU {device.index}", total, free)
