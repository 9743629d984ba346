"""GPU memory of a decode worker by purpose, and its start-up time."""

from __future__ import annotations

from typing import Any

from bench.decode.engine import DecodeEngine


def memory_use(engine: DecodeEngine) -> dict[str, Any]:
    """Memory after load and capture, as the driver counts the whole GPU: nothing else may run on it.

    `other_gb` is everything but weights and KV: other tensors, memory that torch has reserved, and memory
    outside torch (the driver's context, kernel code, graphs). Seconds count from when the weights are loaded.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    kv = sum(pool.nbytes for pool in engine.model.cache.storage)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {
        **shares(total - free, engine.weight_bytes, kv, allocated, reserved),
        "weights_s": round(engine.started.weights_s, 2),
        "graphs_s": round(engine.started.graphs_s, 2),
        "first_token_s": round(engine.started.first_token_s, 2),
    }


def shares(used: int, weights: int, kv: int, allocated: int, reserved: int) -> dict[str, float]:
    """Memory in use by purpose, in GB of 10^9 bytes."""
    parts = {
        "weights": weights,
        "kv": kv,
        "other": used - weights - kv,
        "other_torch": allocated - weights - kv,
        "other_reserved": reserved - allocated,
        "other_outside_torch": used - reserved,
    }
    return {f"{name}_gb": round(size / 1e9, 3) for name, size in parts.items()}
