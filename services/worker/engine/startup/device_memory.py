"""The memory of a worker's devices as reports have it, measured when its start has ended."""

from __future__ import annotations

import torch

from baton.v1.worker_pb2 import DeviceMemory
from services.worker.engine.startup.model_loader import LoadedModel


def device_memory(model: LoadedModel) -> list[DeviceMemory]:
    """The memory of each device, by rank. On a CPU, whose memory all ranks share, there is only that of
    weights and KV blocks."""
    found = list[DeviceMemory]()
    for rank, cache in zip(model.ranks, model.cache.ranks, strict=True):
        memory = DeviceMemory(index=len(found), weights_bytes=rank.nbytes, kv_bytes=cache.nbytes)
        if rank.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(rank.device)
            memory.index = rank.device.index
            memory.used_bytes, memory.total_bytes = total - free, total
        found.append(memory)
    return found
