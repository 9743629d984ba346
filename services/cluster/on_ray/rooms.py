"""Chooses the Ray node that runs a worker: one with room for its role, else none yet.

A node declares its room as Ray resources, `ray start --resources='{"baton-prefill": 1, "baton-decode": 3}'`.
One that declares none has room for as many workers as it has GPUs for, or on a CPU for sixteen where it has
CPUs.
One that declares another name alone, as `{"baton-none": 1}`, runs no workers: Ray drops resources of 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from services.common.config.types import Role

# Workers of a host, as many as the chart's network policies open ports for.
MAX_PLACES = 16
_RESOURCE = "baton-"


@dataclass(frozen=True, slots=True)
class Node:
    """A live Ray node with its resources: `GPU`, `CPU`, and the room that it declares."""

    id: str
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str = ""

    @property
    def gpus(self) -> int:
        return int(self.resources.get("GPU", 0))

    @property
    def declared(self) -> dict[Role, int]:
        """Room for workers by role; empty where the node declares none."""
        return {
            name.removeprefix(_RESOURCE): int(count)  # type: ignore[misc]
            for name, count in self.resources.items()
            if name.startswith(_RESOURCE)
        }

    def room(
        self, role: Role, here: Sequence[Role], *, on_gpu: bool, gpu_workers: int, devices: Mapping[Role, int]
    ) -> int:
        """Number of further workers of a role that the node has room for beside those of the roles `here`.
        `devices`: GPUs of a worker of each role, where it is not one."""
        if self.declared:
            return self.declared.get(role, 0) - here.count(role)
        if on_gpu:
            own = devices.get(role, 1)
            used = sum(devices.get(other, 1) for other in here)
            free = (self.gpus * gpu_workers - used) // own if own <= self.gpus else 0
            return min(free, MAX_PLACES - len(here))
        return MAX_PLACES - len(here) if self.resources.get("CPU") else 0


def declared(counts: Mapping[Role, int]) -> dict[str, int]:
    """The resources of a node with room for `counts` workers of each role."""
    return {f"{_RESOURCE}{role}": count for role, count in counts.items()}


def find_room(
    role: Role,
    nodes: Sequence[Node],
    placed: Mapping[str, Sequence[Role]],
    *,
    on_gpu: bool,
    gpu_workers: int = 1,
    devices: Mapping[Role, int] = MappingProxyType({}),
    silent: Collection[str] = (),
) -> Node | None:
    """The node for one more worker; None where none has room. `placed` has the roles of the workers of each
    node; `devices` says how many GPUs a worker of each role has, where it is not one; `silent` are the ids of
    nodes on which something has not answered lately.

    It prefers a node that is not silent, then one with fewer workers of this role than of the other, so that
    it completes a pair, then the one with the fewest workers, then the first by id.
    """

    def rank(node: Node) -> tuple[bool, bool, int, str]:
        here = placed.get(node.id, ())
        return node.id in silent, here.count(role) >= len(here) - here.count(role), len(here), node.id

    with_room = [
        node
        for node in nodes
        if node.room(role, placed.get(node.id, ()), on_gpu=on_gpu, gpu_workers=gpu_workers, devices=devices)
        > 0
    ]
    return min(with_room, key=rank, default=None)


def first_free_place(taken: Collection[int]) -> int:
    """The lowest place of a host that no worker has; ports count from it."""
    return next(place for place in range(len(taken) + 1) if place not in taken)
