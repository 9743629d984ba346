"""Which Ray node runs a detached worker: one with room for its role, else none yet.

A node declares its room as Ray resources, `ray start --resources='{"baton-prefill": 1, "baton-decode": 3}'`.
One that declares none has room for a worker on each of its GPUs, or on a CPU for sixteen where it has CPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from services.common.config.types import Role

# Workers of a host: as many as the chart's network policies open ports for.
MAX_PLACES = 16
_RESOURCE = "baton-"


@dataclass(frozen=True, slots=True)
class Node:
    """A live Ray node with its resources: `GPU`, `CPU`, and the room that it declares."""

    id: str
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        return int(self.resources.get("GPU", 0))

    @property
    def declared(self) -> dict[str, int]:
        """Room for workers by role; empty where the node declares none."""
        return {
            name.removeprefix(_RESOURCE): int(count)
            for name, count in self.resources.items()
            if name.startswith(_RESOURCE)
        }

    def room(self, role: Role, here: Sequence[Role], *, on_gpu: bool, gpu_workers: int) -> int:
        """How many more workers of a role it has room for beside those of the roles `here`."""
        if self.declared:
            return min(self.declared.get(role, 0) - here.count(role), MAX_PLACES - len(here))
        if on_gpu:
            return min(self.gpus * gpu_workers, MAX_PLACES) - len(here)
        return MAX_PLACES - len(here) if self.resources.get("CPU") else 0


def find_room(
    role: Role,
    nodes: Sequence[Node],
    placed: Mapping[str, Sequence[Role]],
    *,
    on_gpu: bool,
    gpu_workers: int = 1,
) -> Node | None:
    """The node for one more worker; None where none has room. `placed` has the roles of the workers of each
    node.

    It prefers a node with fewer workers of this role than of the other, so that it completes a pair, then
    the one with the fewest workers, then the first by id.
    """

    def rank(node: Node) -> tuple[bool, int, str]:
        here = placed.get(node.id, ())
        return here.count(role) >= len(here) - here.count(role), len(here), node.id

    with_room = [
        node
        for node in nodes
        if node.room(role, placed.get(node.id, ()), on_gpu=on_gpu, gpu_workers=gpu_workers) > 0
    ]
    return min(with_room, key=rank, default=None)


def gpu_share(node: Node, configured: int | None) -> int:
    """Workers that share a GPU of the node once all its room is taken."""
    if configured is not None or not node.gpus:
        return configured or 1
    return max(1, -(-sum(node.declared.values()) // node.gpus))


def first_free_place(taken: Collection[int]) -> int:
    """The lowest place of a host that no worker has; ports count from it. Below MAX_PLACES by `room`."""
    return next(place for place in range(len(taken) + 1) if place not in taken)
