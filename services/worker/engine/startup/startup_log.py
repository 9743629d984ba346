"""Log lines of an engine's start on a GPU: how long it compiled and captured, and how its memory is used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.base.errors import BatonError, ErrorKind
from baton.device.kernel_files.cache import counted_kernels, kernel_cache
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.modules import Model
from baton.engine.shared_memory.step_shape import StepShape
from baton.engine.speculation.sizes import history_bytes, slot_draft_bytes
from services.common.config.worker import EngineConfig
from services.common.observability.logs import get_log
from services.worker.engine.startup.memory_plan import draft_bytes, exchange_bytes, link_bytes, other_bytes
from services.worker.engine.startup.model_loader import LoadedModel

log = get_log(__name__)


@contextmanager
def capture_logged(device: torch.device) -> Iterator[None]:
    """Logs how long its block takes, which compiles kernels and captures graphs. Raises BatonError(INVALID)
    where compiled kernels cannot be cached."""
    if device.type != "cuda":
        yield
        return
    try:
        folder = kernel_cache()
    except OSError as error:
        raise BatonError(
            ErrorKind.INVALID, f"compiled kernels cannot be cached (engine.kernel_cache): {error}"
        ) from error
    began = time.monotonic()
    with counted_kernels() as kernels:
        yield
    seconds = round(time.monotonic() - began, 2)
    if kernels.needed:
        counts = {"kernels": kernels.needed, "compiled": kernels.compiled}
        log.info("graphs_captured", seconds=seconds, **counts, kernel_cache=str(folder))


def log_memory(model: LoadedModel, engine: EngineConfig) -> None:
    """Logs how memory is used, and for how many slots; on a CPU that of drafts, where there are any, and of
    each device, where there are several.

    `buffers_gb`: this process's tensors other than weights and KV blocks. `other_gb`: all but those two, the
    driver's share included; only where no other worker shares the GPU. `planned_links_gb`: set aside for
    links to other GPUs, which are opened later. `kernels_gb`, in `other_gb`: what loading all kernels at once
    has taken, of several GPUs. With drafts, `history_bytes`: the tokens that they are looked
    up in; `lookahead_bytes`: the lookahead table, where there is one; `draft_bytes`: drafts themselves; and
    `draft_tokens`: the most that a step verifies of a sequence.
    """
    shape = StepShape(model.slots, model.rows_per_slot)
    drafts: dict[str, object] = {}
    if shape.rows_per_slot > 1:
        history = history_bytes(model.slots, engine.history_tokens(model.max_context_tokens))
        drafts = {"draft_tokens": shape.rows_per_slot - 1, "history_bytes": history}
        drafts["draft_bytes"] = slot_draft_bytes(model.slots)
        if engine.lookahead_table_bytes:
            drafts["lookahead_bytes"] = engine.lookahead_table_bytes
    if len(model.ranks) > 1:
        log.info(
            "model_divided",
            devices=len(model.ranks),
            weights_gb=[round(rank.nbytes / 1e9, 3) for rank in model.ranks],
            kv_gb=[round(cache.nbytes / 1e9, 3) for cache in model.cache.ranks],
        )
    if model.device.type != "cuda":
        if drafts:
            log.info("memory", slots=model.slots, **drafts)
        return
    kernels = model.kernel_bytes or (0,) * len(model.ranks)
    for rank, cache, loaded in zip(model.ranks, model.cache.ranks, kernels, strict=True):
        _log_gpu(model, rank, cache, loaded, engine, drafts)


def _log_gpu(
    model: LoadedModel,
    rank: Model,
    cache: KVCache,
    kernel_bytes: int,
    engine: EngineConfig,
    drafts: dict[str, object],
) -> None:
    """Logs how the memory of one of a worker's GPUs is used."""
    shape = StepShape(model.slots, model.rows_per_slot)
    free, total = torch.cuda.mem_get_info(rank.device)
    weights, blocks = rank.nbytes, cache.nbytes
    known = weights + blocks
    used = {
        "weights_gb": weights,
        "kv_gb": blocks,
        "buffers_gb": torch.cuda.memory_reserved(rank.device) - known,
        "planned_links_gb": link_bytes(engine, rank.layout),
        "gpu_used_gb": total - free,
        "gpu_gb": total,
    }
    if kernel_bytes:
        used["kernels_gb"] = kernel_bytes
    if (engine.gpu_workers or 1) == 1:
        used["other_gb"] = total - free - known
        planned = other_bytes(rank.config, engine, shape, model.chunk_tokens)
        planned += exchange_bytes(rank.config, engine, shape, model.chunk_tokens)
        planned += draft_bytes(rank.config, engine, rank.layout, shape, model.max_context_tokens)
        planned += engine.lookahead_table_bytes + kernel_bytes
        used["planned_other_gb"] = planned
    figures = drafts | {name: round(count / 1e9, 2) for name, count in used.items()}
    figures["kv_dtype"] = model.layout.cache_dtype
    figures["kv_bytes_per_token"] = sum(
        group.block_bytes // group.block_tokens for group in rank.layout.groups
    )
    gpu, weight_format = rank.device.index, model.weight_format
    log.info("memory", gpu=gpu, slots=model.slots, weight_format=weight_format, **figures)
