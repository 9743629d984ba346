"""What a decode worker's GPU memory goes to, and how long it takes to start."""

from __future__ import annotations

from typing import Any

from bench.decode.engine import DecodeEngine


def told(engine: DecodeEngine) -> dict[str, Any]:
    """After load and capture, as the driver counts the whole GPU: nothing else may run on it.

    `other_gb` is all but weights and KV: what torch holds beside them, what it has reserved and not given
    out, and what is not torch's (the driver's context, code of kernels, graphs). Seconds count from the
    moment that the weights are in place.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    kv = sum(group.nbytes for group in engine.model.cache.groups)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {
        **shares(total - free, engine.weight_bytes, kv, allocated, reserved),
        "weights_s": round(engine.started.weights_s, 2),
        "graphs_s": round(engine.started.graphs_s, 2),
        "first_token_s": round(engine.started.first_token_s, 2),
    }


def shares(used: int, weights: int, kv: int, allocated: int, reserved: int) -> dict[str, float]:
    """Bytes in use, by what they are, in GB of 10^9."""
    parts = {
        "weights": weights,
        "kv": kv,
        "other": used - weights - kv,
        "other_torch": allocated - weights - kv,
        "other_reserved": reserved - allocated,
        "other_outside_torch": used - reserved,
    }
    return {f"{name}_gb": round(size / 1e9, 3) for name, size in parts.items()}
