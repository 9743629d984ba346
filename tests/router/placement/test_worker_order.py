"""Combined workers whose prefix caches differ: what is cached at one, and how many sequences it runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from functools import partial

import pytest

from baton.perf_model.step_costs import StepCosts
from services.router.placement.claim import Claim
from services.router.placement.placement import Placement
from services.router.placement.worker_order import WorkerOrder
from services.router.request.slo import Slo
from services.router.workers.worker import Worker
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import COSTS, Cluster, Machine, Served, Traffic
from tests.router.workers.bare_workers import bare_worker, placement_of, pools_of

SHARED, OWN, OUTPUT = 1024, 128, 128


def rated(name: str, running: int) -> Worker:
    worker = bare_worker(name, slots=400)
    worker.costs = COSTS
    worker.claimed_slots, worker.claimed_context = running, 1200 * running
    return worker


def _tokens(cached: Mapping[Worker, int], worker: Worker) -> int:
    return cached.get(worker, 0)


@pytest.mark.parametrize(
    ("cached", "running", "beside", "stays"),
    [
        (1024, 10, 8, True),
        (1024, 10, 0, False),  # an idle worker has no sequences whose steps a prompt would delay
        (2048, 30, 20, True),
        (2048, 150, 20, False),
        (64, 12, 8, False),
    ],
)
def test_a_prompt_is_computed_again_where_that_delays_all_requests_less(
    cached: int, running: int, beside: int, stays: bool
) -> None:
    holds, other = rated("both-0", running), rated("both-1", beside)
    for order in ([holds, other], [other, holds]):
        placement = placement_of(order, ahead=10**6)
        claim = placement.pick(2200, 128, partial(_tokens, {holds: cached}))
        assert isinstance(claim, Claim)
        assert claim.decode is (holds if stays else other)
        claim.release()


def test_a_worker_that_was_never_measured_gets_as_much_as_the_others() -> None:
    """Whatever they have cached: so it is measured, and one that has just come is not given all."""
    known, new = rated("both-0", 3), bare_worker("both-1", slots=400)
    placement = placement_of([known, new], ahead=10**6)
    claims = [placement.pick(1100, 128, partial(_tokens, {known: 1024})) for _ in range(9)]
    decoding = [claim.decode for claim in claims if isinstance(claim, Claim)]
    assert decoding[:3] == [new] * 3
    assert (known.claimed_slots, new.claimed_slots) == (6, 6)


@pytest.mark.parametrize("context_token_s", [0.0, 1e-11])
def test_workers_whose_sequences_seem_to_cost_nothing_share_them(context_token_s: float) -> None:
    """After a few steps of one load, one seems faster than the other, and more sequences cost neither any."""
    workers = [bare_worker("both-0", slots=400), bare_worker("both-1", slots=400)]
    for worker, step_s in zip(workers, (0.0031, 0.0047), strict=True):
        worker.costs = StepCosts(decode_step_s=step_s, decode_context_token_s=context_token_s)
    placement = placement_of(workers, ahead=10**6)
    for _ in range(8):
        assert isinstance(placement.pick(40, 300, partial(_tokens, {})), Claim)
    assert [worker.claimed_slots for worker in workers] == [4, 4]


def test_what_delays_streams_with_time_to_spare_counts_less() -> None:
    """So a request whose streams are far from their limits stays where it is cached, up to more sequences."""
    stays = []
    for tpot_s in (None, 0.1):
        holds, other = rated("both-0", 30), rated("both-1", 1)
        for worker in (holds, other):
            worker.tpot_limits = [0.1] * worker.claimed_slots if tpot_s else []
        placement = placement_of([holds, other], ahead=10**6)
        claim = placement.pick(1100, 128, partial(_tokens, {holds: 1024}), tpot_s=tpot_s)
        assert isinstance(claim, Claim)
        stays.append(claim.decode is holds)
    assert stays == [False, True]


def test_workers_share_the_load_of_requests_that_share_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has it cached at first, from a request that came alone."""

    def serve() -> tuple[float, list[int]]:
        machines = [Machine("both") for _ in range(2)]

        async def main() -> list[Served]:
            cluster = Cluster(machines, lambda found, workers: Placement(found, pools_of(workers), 2048))
            first, second = cluster.views[0]
            loop, requests = asyncio.get_running_loop(), []
            for at in Traffic(60, 8, ()).arrivals(random.Random(5)):
                await asyncio.sleep(at - loop.time())
                has = (first, second) if machines[1].most_running else (first,)
                cached = dict.fromkeys(has, SHARED)
                one = cluster.serve(0, None, SHARED + OWN, OUTPUT, cached=partial(_tokens, cached))
                requests.append(asyncio.create_task(one))
            return [await request for request in requests]

        served = run_virtual(main())
        in_time = sum(one.meets(Slo(0.5, 0.008)) for one in served) / len(served)
        return in_time, [machine.most_running for machine in machines]

    in_time, running = serve()
    assert in_time >= 0.97
    assert max(running) < 1.5 * min(running), running
    decode = WorkerOrder.decode
    monkeypatch.setattr(
        WorkerOrder, "decode", lambda order, worker: decode(order, worker)._replace(delay_s=0)
    )
    in_time, running = serve()
    assert in_time < 0.9, running
