"""Processes of one router count the requests that wait in another one: they leave room to older ones, and
refuse what would be late behind all. In virtual time: the real queue, placement and reports before modelled
workers."""

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
from services.router.workers.backlog import Queued
from services.router.workers.other_claims import SiblingCounts
from services.router.workers.recent_mean import RecentMean
from services.router.workers.recent_work import Turnover
from services.router.workers.tpot_ratio import TpotRatio
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
        self, index: int, workers: list[Worker], queue: WaitingQueue, views: list[ModelledView]
    ) -> None:
        member = GroupMember(index=index, count=2, folder="")
        prefixes = cast("PrefixAffinity", SimpleNamespace())
        super().__init__(
            member,
            lambda: workers,
            prefixes,
            queue._placement.duty,
            lambda: OwnLoad(0, queue.waiting_for_prefill, queue.first_waiting, queue.queued),
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

    def __init__(self, machines: list[Machine], first_ratio: float, *, refuse_late: bool = False) -> None:
        """`first_ratio`: by which the first process corrects predictions at its start."""
        super().__init__(machines, partial(_placement, refuse_late), routers=2, heartbeat_s=0.25)
        for worker in self.views[0]:
            worker.tpot_ratio = TpotRatio()
            worker.tpot_ratio.value = first_ratio
        views: list[ModelledView] = []
        for index, (workers, queue) in enumerate(zip(self.views, self.queues, strict=True)):
            view = ModelledView(index, workers, queue, views)
            queue._placement.on_claim = queue.on_wait = view.changed
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
) -> tuple[list[Served], list[Served]]:
    """What the requests of each process got, the first of which gets `first_share` of them."""

    async def main() -> tuple[list[Served], list[Served]]:
        machines = [Machine(role, exchanges=role == "both") for role in roles]
        cluster = TwoProcesses(machines, first_ratio, refuse_late=refuse_late)
        draw, loop = random.Random(7), asyncio.get_running_loop()
        requests: tuple[list[asyncio.Task[Served]], ...] = ([], [])
        for at in Traffic(rate, SECONDS, (slo,)).arrivals(draw):
            await asyncio.sleep(at - loop.time())
            process = int(draw.random() > first_share)
            requests[process].append(asyncio.create_task(cluster.serve(process, slo)))
        first, second = [[await one for one in each] for each in requests]
        return first, second

    return run_virtual(main())


def shares(
    roles: tuple[str, ...], rate: float, slo: Slo, first_share: float, first_ratio: float = 1.0
) -> tuple[float, float]:
    """The share of the requests in time of each process; the arguments are those of `serve`."""
    served = serve(roles, rate, slo, first_share, first_ratio)
    first, second = (sum(one.meets(slo) for one in each) / len(each) for each in served)
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
    found = shares(roles, rate, slo, 0.7)
    assert min(found) >= 0.88, found
    monkeypatch.setattr(SiblingCounts, "waiting_before", lambda counts, precedence: 0)
    assert min(shares(roles, rate, slo, 0.7)) < min(found) - 0.05


def test_a_process_that_predicts_longer_steps_does_not_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees no room where the other one does, places little, and by itself would learn little of what
    tokens take now."""
    unequal = partial(shares, ("prefill", "decode"), 34, Slo(0.5, 0.008), 0.2, 1.03)
    found = unequal()
    assert min(found) >= 0.88, found
    monkeypatch.setattr(RecentMean, "take", lambda mean, sibling, reported: None)
    assert min(unequal()) < min(found) - 0.1


@pytest.mark.parametrize(("tpot_s", "sustained", "first_share"), [(0.012, 36, 0.5), (0.008, 33, 0.25)])
def test_early_refusal_counts_what_waits_in_the_other_process(
    tpot_s: float, sustained: int, first_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice what one pair sustains. By its own queue each process would let in twice as many as are served
    in time, and refuse them when they are late."""
    slo = Slo(0.5, tpot_s)

    def served() -> list[Served]:
        roles = ("prefill", "decode")
        first, second = serve(roles, 2 * sustained, slo, first_share, refuse_late=True)
        return [*first, *second]

    found = served()
    accepted = [one for one in found if one.refused_s is None]
    assert sum(one.meets(slo) for one in accepted) >= 0.98 * len(accepted)
    assert len(accepted) >= 0.9 * sustained * SECONDS
    refused = sorted(one.refused_s for one in found if one.refused_s is not None)
    assert refused[int(0.96 * len(refused))] == 0, "at once"
    monkeypatch.setattr(SiblingView, "queued", Queued())
    assert sum(one.meets(slo) for one in served()) < 0.95 * len(accepted)


def test_slots_that_the_other_process_releases_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has a tenth of the requests sees few of them end, where they wait for decode; it refuses
    no more of them than the other one does."""

    def accepted() -> list[float]:
        both = serve(("prefill", "decode"), 66, Slo(0.5, 0.008), 0.1, refuse_late=True)
        return [sum(one.refused_s is None for one in each) / len(each) for each in both]

    first, second = accepted()
    assert first >= 0.9 * second
    monkeypatch.setattr(Turnover, "per_second", property(lambda turnover: turnover.own))
    first, second = accepted()
    assert first <= 0.6 * second
