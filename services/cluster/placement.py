"""Which host runs which worker, and on which of its GPUs: pure functions over hosts and roles.

Prefill and decode workers are placed on one host where possible, since KV then moves within it. A GPU is
identified by its index in CUDA's order: every worker sees all GPUs that `baton up` sees
(CUDA_VISIBLE_DEVICES), and uses the one that it is assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig
from services.common.config.types import Role


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that may run workers."""

    id: str
    gpus: int


def place(
    wanted: Sequence[tuple[str, Role]], hosts: Sequence[Host], placed: Mapping[str, str], on_gpu: bool
) -> dict[str, str]:
    """Assigns each (name, role) of `wanted` to a host; returns host ids by name. Workers in `placed` (name →
    host id) stay.

    A worker goes, in order of preference, to a host with a free GPU; to one with fewer workers of its own
    role than of the other, so that it completes a pair; to the one with the fewest workers; to the first by
    id.
    Raises ValueError without hosts.
    """
    if not hosts:
        raise ValueError("no hosts")
    known = {host.id for host in hosts}
    where = {name: placed[name] for name, _ in wanted if placed.get(name) in known}
    roles = dict(wanted)
    for name, role in wanted:
        if name not in where:
            ranked = sorted(hosts, key=lambda host: _rank(host, role, where, roles, on_gpu))
            where[name] = ranked[0].id
    return where


def _rank(
    host: Host, role: Role, where: Mapping[str, str], roles: Mapping[str, Role], on_gpu: bool
) -> tuple[bool, bool, int, str]:
    here = [roles[name] for name, host_id in where.items() if host_id == host.id]
    full = on_gpu and len(here) >= host.gpus
    partners = sum(other not in (role, "both") for other in here) if role != "both" else 0
    completes = here.count(role) < partners
    return full, not completes, len(here), host.id


def require_gpus(config: ClusterConfig, gpus: int) -> None:
    """Raises BatonError(INVALID) where more workers would share a GPU than `engine.gpu_workers` allows.

    Unset, each worker has a GPU of its own, but a single GPU is shared by all, and so is one that is
    configured (`device_index`). Without GPUs nothing is raised: a worker that needs one reports that itself.
    """
    engine, workers = config.workers[0].engine, len(config.workers)
    named = engine.device == "cpu" or engine.device_index is not None
    if named or gpus == 0 or (gpus == 1 and engine.gpu_workers is None):
        return
    if workers > gpus * (engine.gpu_workers or 1):
        available = f"there {'is' if gpus == 1 else 'are'} {gpus}"
        most = f", each shared by at most {engine.gpu_workers}" if engine.gpu_workers else ""
        raise BatonError(
            ErrorKind.INVALID,
            f"{workers} workers need a GPU, and {available}{most}: start fewer workers, or let "
            f"{gpu_workers(workers, gpus)} share one (--gpu-workers)",
        )


def gpu_workers(workers: int, gpus: int) -> int:
    """The most workers of a host that share one GPU when they are distributed evenly; all of them where the
    number of GPUs is unknown (0), since each then uses the first."""
    return max(1, -(-workers // gpus) if gpus else workers)


def least_used_gpu(gpus: int, used: Iterable[int]) -> int | None:
    """The index of the host's GPU with the fewest workers; None where the host has none."""
    counts = dict.fromkeys(range(gpus), 0)
    for index in used:
        if index in counts:
            counts[index] += 1
    return min(counts, key=lambda index: (counts[index], index), default=None)
