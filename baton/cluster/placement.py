"""Which host runs which worker, and on which of its GPUs: pure functions over hosts and roles.

Prefill and decode meet on one host where they can, since KV then moves within it. GPUs are named by index in
CUDA's order: every worker sees all that `baton up` was given (CUDA_VISIBLE_DEVICES), and takes the one it is
told of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.errors import BatonError, ErrorKind
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
    """A host's id for each wanted (name, role), those in `placed` (name → host id) where they are.

    In this order a worker prefers: a host with a GPU left for it; one where fewer of its own role than of the
    other are, so that it completes a pair; the one with the fewest workers; the first by id.
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
    """BatonError(INVALID) where more workers would share one of `gpus` than `gpu_workers` says.

    Unset, one has a GPU for itself; but a lone GPU is shared by all, and so is one that is named
    (`device_index`). Without GPUs nothing is said here: a worker that needs one will.
    """
    engine, workers = config.workers[0].engine, len(config.workers)
    named = engine.device == "cpu" or engine.device_index is not None
    if named or gpus == 0 or (gpus == 1 and engine.gpu_workers is None):
        return
    if workers > gpus * (engine.gpu_workers or 1):
        there = f"there {'is' if gpus == 1 else 'are'} {gpus}"
        most = f", for {engine.gpu_workers} each at most" if engine.gpu_workers else ""
        raise BatonError(
            ErrorKind.INVALID,
            f"{workers} workers want a GPU, and {there}{most}: have fewer workers, or let "
            f"{gpu_workers(workers, gpus)} share one (--gpu-workers)",
        )


def gpu_workers(workers: int, gpus: int) -> int:
    """How many of a host's workers share a GPU at most, since `free_gpu` deals them out evenly; all of them
    where the host names no GPU: those that find one take the first."""
    return max(1, -(-workers // gpus) if gpus else workers)


def free_gpu(gpus: int, used: Iterable[int]) -> int | None:
    """The index of the host's GPU with the fewest workers; None where the host has none."""
    counts = dict.fromkeys(range(gpus), 0)
    for index in used:
        if index in counts:
            counts[index] += 1
    return min(counts, key=lambda index: (counts[index], index), default=None)
