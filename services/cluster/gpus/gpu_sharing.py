"""Chooses the GPUs that workers are given, by index: pure functions.

A GPU is identified by its index in CUDA's order: every worker sees all GPUs that `baton up`, or its Ray node,
sees (CUDA_VISIBLE_DEVICES), and uses those that it is assigned, `engine.tensor_parallel` of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baton.base.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig


def require_gpus(config: ClusterConfig, gpus: int) -> None:
    """Raises BatonError(INVALID) where a worker needs more GPUs than this host has, or more workers would
    share a GPU than `engine.gpu_workers` allows.

    Unset, no worker shares its GPUs with another, but a single GPU is shared by all, and so are those that
    are configured (`device_indexes`). Without GPUs nothing is raised: a worker that needs one reports that
    itself.
    """
    engine, needed = config.workers[0].engine, config.gpus_needed
    if engine.device == "cpu" or engine.device_indexes or gpus == 0:
        return
    available = f"there {'is' if gpus == 1 else 'are'} {gpus}"
    largest = max(config.workers, key=lambda worker: worker.engine.tensor_parallel)
    if (devices := largest.engine.tensor_parallel) > gpus:
        raise BatonError(
            ErrorKind.INVALID,
            f"{largest.name} needs {devices} GPUs (tensor_parallel), and {available}; {gpus} would be enough "
            f"for tensor_parallel {gpus}",
        )
    if gpus == 1 and engine.gpu_workers is None:
        return
    if needed > gpus * (engine.gpu_workers or 1):
        workers = len(config.workers)
        most = f", each shared by at most {engine.gpu_workers}" if engine.gpu_workers else ""
        need = "a GPU" if needed == workers else f"{needed} GPUs"
        raise BatonError(
            ErrorKind.INVALID,
            f"{workers} workers need {need}, and {available}{most}: start fewer workers, or let "
            f"{gpu_workers(needed, gpus)} share one (--gpu-workers)",
        )


def gpu_workers(needed: int, gpus: int) -> int:
    """The most workers of a host that share one GPU when they are distributed evenly, of workers that need
    `needed` GPUs together; `needed` where the number of GPUs is unknown (0), since each then uses the
    first."""
    return max(1, -(-needed // gpus) if gpus else needed)


def least_used_gpus(gpus: int, used: Iterable[int], count: int = 1) -> tuple[int, ...]:
    """The indexes of the `count` GPUs of the host with the fewest workers, in ascending order; empty where
    the host has none. `used` has the indexes that workers have, one for each worker and GPU."""
    workers = Counter(used)
    return tuple(sorted(sorted(range(gpus), key=lambda index: (workers[index], index))[:count]))
