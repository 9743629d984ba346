"""Two processes of one router in virtual time: the real queue, placement and reports, before modelled
workers."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from services.common.config.router import GroupMember
from services.router.placement.placement import Placement
from services.router.placement.prefix_affinity import PrefixAffinity
from services.router.processes import sibling_view
from services.router.processes.sibling_view import OwnLoad, SiblingView
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.slo import Slo
from services.router.workers.recent_mean import TpotRatio
from services.router.workers.worker import Worker
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import Cluster, Machine, Served, Traffic
from tests.router.workers.bare_workers import Found, pools_of

# From one process to another: the receiver's event loop is busy for a while.
LATENCY_S = 0.001
SECONDS = 10


class ModelledView(SiblingView):
    """Reports by calls in place of sockets, and only after changes."""

    def __init__(
        self,
        index: int,
        workers: list[Worker],
        placement: Placement,
        queue: WaitingQueue,
        views: list[ModelledView],
    ) -> None:
        member = GroupMember(index=index, count=2, folder="")
        prefixes = cast("PrefixAffinity", SimpleNamespace())
        super().__init__(
            member,
            lambda: workers,
            prefixes,
            placement.division,
            lambda: OwnLoad.of(0, queue),
        )
        self._queue, self._views = queue, views
        views.append(self)

    def changed(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(sibling_view.SOON_S, self._send_changes)

    def changed_at_workers(self) -> None:
        self.changed()
        self._queue.place_waiting()

    def _send(self, datagram: bytes) -> None:
        for other in self._views:
            if other is not self:
                asyncio.get_running_loop().call_later(LATENCY_S, other.receive, datagram)


class TwoProcesses(Cluster):
    """Two processes of one router."""

    def __init__(self, machines: list[Machine], first_ratio: float, *, refuse_late: bool = False) -> None:
        """`first_ratio`: by which the first process corrects predictions at its start."""
        super().__init__(machines, partial(_placement, refuse_late), routers=2, heartbeat_s=0.25)
        for worker in self.views[0]:
            worker.tpot_ratio = TpotRatio()
            worker.tpot_ratio.value = first_ratio
        views: list[ModelledView] = []
        routers = zip(self.views, self.placements, self.queues, strict=True)
        for index, (workers, placement, queue) in enumerate(routers):
            view = ModelledView(index, workers, placement, queue, views)
            placement.on_claim = queue.on_wait = view.changed
            queue.siblings = view
            for number, worker in enumerate(workers):
                worker.identity.incarnation = bytes([number + 1]) * 16
                cast("Any", worker).changed = view.changed_at_workers


def _placement(refuse_late: bool, found: Found, workers: list[Worker]) -> Placement:
    return Placement(found, pools_of(workers), 2048, refuse_late=refuse_late)


def serve(
    roles: tuple[str, ...],
    rate: float,
    slo: Slo,
    first_share: float,
    first_ratio: float = 1.0,
    *,
    refuse_late: bool = False,
    seconds: float = SECONDS,
) -> tuple[list[Served], list[Served]]:
    """Returns the requests that each process served, the first of which gets `first_share` of them."""

    async def main() -> tuple[list[Served], list[Served]]:
        machines = [Machine(role, exchanges=role == "both") for role in roles]
        cluster = TwoProcesses(machines, first_ratio, refuse_late=refuse_late)
        draw, loop = random.Random(7), asyncio.get_running_loop()
        requests: tuple[list[asyncio.Task[Served]], ...] = ([], [])
        for at in Traffic(rate, seconds, (slo,)).arrivals(draw):
            await asyncio.sleep(at - loop.time())
            process = int(draw.random() > first_share)
            requests[process].append(asyncio.create_task(cluster.serve(process, slo)))
        first, second = [[await one for one in each] for each in requests]
        return first, second

    return run_virtual(main())
