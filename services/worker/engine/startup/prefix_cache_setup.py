"""Builds a worker's prefix cache from its configuration: blocks on the device and, where prompts are
computed, host memory and a disk behind them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.prefix_cache.disk_store import DiskBlockStore
from baton.engine.prefix_cache.host_store import HostBlockStore
from baton.model_spec.block_hash import BlockHasher
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log
from services.worker.engine.startup.host_memory import check_installed
from services.worker.engine.startup.model_loader import LoadedModel

# Tenants whose hashers are cached.
_TENANTS = 1024

log = get_log(__name__)


def prefix_cache(model: LoadedModel, config: WorkerConfig, wake: Callable[[], None]) -> PrefixCache | None:
    """The prefix cache; None where it is disabled or the cache groups have blocks of different sizes. `wake`
    is called from another thread once a block has been read from the disk."""
    sizes = {group.block_tokens for group in model.layout.groups}
    if not config.engine.prefix_cache or len(sizes) != 1:
        return None
    secret = config.prefix_secret.encode() or secrets.token_bytes(32)

    @lru_cache(_TENANTS)
    def hasher_of(tenant: str) -> BlockHasher:
        return BlockHasher(
            secret,
            tenant=tenant,
            fingerprint=model.fingerprint,
            cache_dtype=model.layout.cache_dtype,
            block_tokens=model.layout.groups[0].block_tokens,
        )

    return PrefixCache(model.pools, hasher_of, _store(model, config, hasher_of("").seed, wake))


def _store(
    model: LoadedModel, config: WorkerConfig, key: bytes, wake: Callable[[], None]
) -> HostBlockStore | None:
    engine = config.engine
    if not engine.prefix_host_mb or config.role == "decode":  # decode steps do not wait for copies
        return None
    host_bytes = engine.prefix_host_mb * 10**6
    check_installed("prefix_host_mb", host_bytes)
    disk = None
    if engine.prefix_disk_dir is not None:
        folder = Path(engine.prefix_disk_dir) / config.name  # workers of one host share no files
        block_bytes = sum(group.block_bytes for group in model.layout.groups)
        try:
            budget = engine.prefix_disk_mb * 10**6
            disk = DiskBlockStore(folder, key, block_bytes, budget, wake, partial(_on_outage, folder))
        except OSError as error:
            message = f"prefix_disk_dir {engine.prefix_disk_dir}: {error.strerror}"
            raise BatonError(ErrorKind.INVALID, message) from error
    return HostBlockStore(model.cache, host_bytes, disk)


def _on_outage(folder: Path, reason: str | None) -> None:
    if reason is None:
        log.info("prefix_disk_on", folder=str(folder))
    else:
        log.error("prefix_disk_off", folder=str(folder), reason=reason)
