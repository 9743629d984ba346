"""A worker's prefix cache, as its configuration wants it: the device's blocks, the host's memory behind them, a
disk behind that."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import lru_cache

from baton.block_hash import BlockHasher, seed_of
from baton.engine.prefix_cache import PrefixCache
from services.common.config import WorkerConfig
from services.worker.loaded_model import LoadedModel

# Tenants whose seeds are at hand.
_TENANTS = 1024


def prefix_cache(model: LoadedModel, config: WorkerConfig, wake: Callable[[], None]) -> PrefixCache | None:
    """None where the worker computes no prompts, is told not to, or has cache groups of unlike blocks. `wake`
    is called from another thread where a block has come from the disk."""
    sizes = {group.block_tokens for group in model.layout.groups}
    if config.role == "decode" or not config.engine.prefix_cache or len(sizes) != 1:
        return None
    secret = config.prefix_secret.encode() or secrets.token_bytes(32)

    @lru_cache(_TENANTS)
    def hasher_of(tenant: str) -> BlockHasher:
        seed = seed_of(
            secret,
            tenant=tenant,
            model=model.fingerprint,
            adapter="",
            cache_dtype=model.layout.cache_dtype,
        )
        return BlockHasher(seed, model.layout.groups[0].block_tokens)

    return PrefixCache(model.pools, hasher_of)
