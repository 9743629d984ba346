"""Processes of one router leave room to older requests that wait in another one, in virtual time: the real
queue, placement and reports before modelled workers."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.common.config.router import GroupMember
from services.router.placement.placement import Placement
from services.router.placement.prefix_affinity import PrefixAffinity
from services.router.processes import sibling_view
from services.router.processes.sibling_view import OwnLoad, SiblingView
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.slo import Slo
from services.router.workers.other_claims import SiblingCounts
from services.router.workers.recent_mean import RecentMean
from services.router.workers.tpot_ratio import TpotRatio
from services.router.workers.worker import Worker
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import Cluster, Machine, Served, Traffic
from tests.router.workers.bare_workers import Found, pools_of

# From one process to another: the receiver's event loop is busy for a while.
LATENCY_S = 0.001


class ModelledView(SiblingView):
    """Reports by calls in place of sockets, and only after changes."""

    def __init__(
        self, index: int, workers: list[Worker], queue: WaitingQueue, views: list[ModelledView]
    ) -> None:
        member = GroupMember(index=index, count=2, folder="")
        prefixes = cast("PrefixAffinity", SimpleNamespace())
        super().__init__(
            member,
            lambda: workers,
            prefixes,
            queue._placement.duty,
            lambda: OwnLoad(0, queue.waiting_for_prefill, queue.first_waiting),
        )
        self._queue, self._views = queue, views
        views.append(self)

    def changed(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(sibling_view._SOON_S, self._send_changes)

    def changed_at_workers(self) -> None:
        self.changed()
        self._queue.place_waiting()

    def _send(self, datagram: bytes) -> None:
        for other in self._views:
            if other is not self:
                asyncio.get_running_loop().call_later(LATENCY_S, other.receive, datagram)


class TwoProcesses(Cluster):
    """Two processes of one router."""

    def __init__(self, machines: list[Machine], first_ratio: float) -> None:
        """`first_ratio`: by which the first process corrects predictions at its start."""
        super().__init__(machines, _placement, routers=2, heartbeat_s=0.25)
        for worker in self.views[0]:
            worker.tpot_ratio = TpotRatio()
            worker.tpot_ratio.value = first_ratio
        views: list[ModelledView] = []
        for index, (workers, queue) in enumerate(zip(self.views, self.queues, strict=True)):
            view = ModelledView(index, workers, queue, views)
            queue._placement.on_claim = queue.on_wait = view.changed
            queue.siblings_waiting_for_prefill = partial(getattr, view, "waiting_for_prefill")
            for number, worker in enumerate(workers):
                worker.identity.incarnation = bytes([number + 1]) * 16
                cast("Any", worker).changed = view.changed_at_workers


def _placement(found: Found, workers: list[Worker]) -> Placement:
    return Placement(found, pools_of(workers), 2048)


def serve(
    roles: tuple[str, ...], rate: float, slo: Slo, first_share: float, first_ratio: float = 1.0
) -> tuple[float, float]:
    """The share of the requests in time of each process, the first of which gets `first_share` of them."""

    async def main() -> tuple[list[Served], list[Served]]:
        machines = [Machine(role, exchanges=role == "both") for role in roles]
        cluster = TwoProcesses(machines, first_ratio)
        draw, loop = random.Random(7), asyncio.get_running_loop()
        requests: tuple[list[asyncio.Task[Served]], ...] = ([], [])
        for at in Traffic(rate, 10, (slo,)).arrivals(draw):
            await asyncio.sleep(at - loop.time())
            process = int(draw.random() > first_share)
            requests[process].append(asyncio.create_task(cluster.serve(process, slo)))
        first, second = [[await one for one in each] for each in requests]
        return first, second

    first, second = (sum(one.meets(slo) for one in each) / len(each) for each in run_virtual(main()))
    return first, second


@pytest.mark.parametrize(
    ("roles", "rate", "tpot_s"),
    [(("prefill", "decode"), 38, 0.008), (("prefill", "both"), 43, 0.012)],
    ids=["room-of-decode", "room-of-prefill"],
)
def test_a_process_with_fewer_requests_does_not_starve(
    roles: tuple[str, ...], rate: float, tpot_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room appears where a request ends: the process with most requests sees it first, and there others wait,
    too. Whichever process a client has reached, its requests are in time."""
    slo = Slo(0.5, tpot_s)
    shares = serve(roles, rate, slo, 0.7)
    assert min(shares) >= 0.88, shares
    monkeypatch.setattr(SiblingCounts, "waiting_before", lambda counts, precedence: 0)
    assert min(serve(roles, rate, slo, 0.7)) < min(shares) - 0.05


def test_a_process_that_predicts_longer_steps_does_not_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees no room where the other one does, places little, and by itself would learn little of what
    tokens take now."""
    unequal = partial(serve, ("prefill", "decode"), 34, Slo(0.5, 0.008), 0.2, 1.03)
    shares = unequal()
    assert min(shares) >= 0.88, shares
    monkeypatch.setattr(RecentMean, "take", lambda mean, sibling, reported: None)
    assert min(unequal()) < min(shares) - 0.1
