"""Tenants before a cluster in virtual time: one that sends too much, shares by weight, priorities.

Each is compared with the same traffic in one queue, first come, first served, which is what requests of no
tenant get.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from services.router.placement.placement import Placement
from services.router.request.request import ClientCall
from services.router.tenants.account import TenantAccount
from services.router.tenants.tenants_file import TenantLimits
from services.router.workers.worker import Worker
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import Cluster, Machine, Served
from tests.router.workers.bare_workers import Found, pools_of
from tests.support.fewer import WITHOUT_THE_RULE

# Prompts of 256 to 1,792 and outputs of 64 to 448 tokens; a pair of workers serves about so many a second.
PROMPTS, OUTPUTS, CAPACITY = (256, 1792), (64, 448), 40.0
SHORT = (8, 56)
AHEAD, MAX_WAITING = 2048, 1024


@dataclass(frozen=True)
class Sender:
    """A tenant's Poisson arrivals: `rate` a second. `ends`: whether its requests are served to their ends;
    else those that have not ended when no more come are left out."""

    name: str
    rate: float
    weight: float = 1.0
    priority: int = 0
    outputs: tuple[int, int] = OUTPUTS
    ends: bool = True


@dataclass(frozen=True)
class Run:
    """One request: what it asked for, and what it got."""

    prompt: int
    output: int
    served: Served

    @property
    def e2e_s(self) -> float:
        assert self.served.ttft_s is not None
        assert self.served.tpot_s is not None
        return self.served.ttft_s + (self.output - 1) * self.served.tpot_s


def placement(found: Found, workers: list[Worker]) -> Placement:
    return Placement(found, pools_of(workers), AHEAD)


def simulate(senders: Sequence[Sender], seconds: float, *, fair: bool = True) -> dict[str, list[Run]]:
    """The requests of `seconds` seconds, by tenant. `fair`: the router knows tenants and priorities."""

    async def main() -> list[list[Run]]:
        machines = [Machine("prefill"), Machine("decode")]
        cluster = Cluster(machines, placement, max_waiting=MAX_WAITING)
        return await asyncio.gather(*(send(cluster, one) for one in senders))

    async def send(cluster: Cluster, sender: Sender) -> list[Run]:
        loop, draw, at = asyncio.get_running_loop(), random.Random(sender.name), 0.0
        account = TenantAccount(sender.name, TenantLimits(), loop.time) if fair else None
        if account is not None:
            account.weight = sender.weight
        requests = []
        while (at := at + draw.expovariate(sender.rate)) < seconds:
            await asyncio.sleep(at - loop.time())
            call = ClientCall(tenant=account, priority=sender.priority if fair else 0)
            sizes = draw.randint(*PROMPTS), draw.randint(*sender.outputs)
            requests.append((sizes, asyncio.create_task(cluster.serve(0, None, *sizes, call))))
        if not sender.ends:
            requests = [(sizes, request) for sizes, request in requests if request.done()]
        return [Run(*sizes, await request) for sizes, request in requests]

    runs = run_virtual(main())
    return {sender.name: of for sender, of in zip(senders, runs, strict=True)}


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def abused(seconds: float, *, ablated: bool) -> None:
    """Seven tenants send nine tenths of their share, one a hundred times its. `ablated`: and in one queue."""
    share = CAPACITY / 8
    others = [Sender(f"other-{number}", 0.9 * share) for number in range(7)]
    abuser = Sender("abuser", 100 * share, ends=False)
    alone = simulate(others, seconds)
    fair = simulate([abuser, *others], seconds)

    def of_others(served: dict[str, list[Run]]) -> list[Run]:
        return [run for one in others for run in served[one.name]]

    assert all(run.served.refused_s is None for run in (*of_others(alone), *of_others(fair)))
    before, beside = ([run.e2e_s for run in of_others(each)] for each in (alone, fair))
    assert p99(beside) <= 1.5 * p99(before), (p99(beside), p99(before))
    waits = [[run.served.ttft_s or 0.0 for run in of_others(each)] for each in (alone, fair)]
    assert p99(waits[1]) <= 2 * p99(waits[0]), list(map(p99, waits))
    assert sum(run.served.ttft_s is not None for run in fair["abuser"]) >= 0.5 * share * seconds
    if not ablated:
        return
    # In one queue the others are refused, or wait behind what the one has sent.
    fifo = simulate([abuser, *(replace(one, ends=False) for one in others)], seconds, fair=False)
    served = [run for run in of_others(fifo) if run.served.ttft_s is not None]
    assert sum(run.e2e_s <= 1.5 * p99(before) for run in served) <= 0.2 * len(before)


@WITHOUT_THE_RULE
def test_one_tenant_at_a_hundred_times_its_share_does_not_hurt_the_others(ablated: bool) -> None:
    abused(6, ablated=ablated)


@pytest.mark.slow
def test_one_tenant_at_a_hundred_times_its_share_does_not_hurt_the_others_for_minutes() -> None:
    abused(180, ablated=True)


def shares_by_weight(seconds: float, *, ablated: bool) -> None:
    """Five tenants send the same, and more than any can get; of what is computed while all wait, each gets a
    share by its weight. `ablated`: and does not in one queue."""
    weights = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0, "e": 0.5}
    senders = [
        Sender(name, 0.6 * CAPACITY, weight, outputs=SHORT, ends=False) for name, weight in weights.items()
    ]

    def shares(*, fair: bool) -> dict[str, float]:
        """The share of each tenant over its weight, where 1 is the mean."""
        served = simulate(senders, seconds, fair=fair)
        # Not the beginning, when nobody waits yet.
        window = [
            (name, run.prompt + 2.5 * run.output)
            for name, runs in served.items()
            for run in runs
            if run.served.ttft_s is not None and seconds / 4 < run.served.arrived_s + run.served.ttft_s
        ]
        total, weight = sum(cost for _, cost in window), sum(weights.values())
        got = {name: sum(cost for of, cost in window if of == name) for name in weights}
        return {name: got[name] / total * weight / weights[name] for name in weights}

    fair = shares(fair=True)
    assert all(0.95 <= share <= 1.05 for share in fair.values()), fair
    if not ablated:
        return
    fifo = shares(fair=False)
    assert not all(0.95 <= share <= 1.05 for share in fifo.values()), fifo


@WITHOUT_THE_RULE
def test_tenants_share_by_weight(ablated: bool) -> None:
    shares_by_weight(24, ablated=ablated)


@pytest.mark.slow
def test_tenants_share_by_weight_for_minutes() -> None:
    shares_by_weight(300, ablated=True)


@WITHOUT_THE_RULE
def test_urgent_requests_wait_less_and_no_priority_starves(ablated: bool) -> None:
    """A tenant's batch at twice what the cluster serves, beside its own urgent requests."""
    batch = Sender("batch", 1.5 * CAPACITY, priority=5, outputs=SHORT, ends=False)
    urgent = Sender("urgent", 0.5 * CAPACITY, outputs=SHORT)
    seconds = 8
    fair = simulate([batch, urgent], seconds)

    def median_ttft_s(runs: list[Run]) -> float:
        return sorted(run.served.ttft_s or seconds for run in runs)[len(runs) // 2]

    assert median_ttft_s(fair["urgent"]) < 0.2
    if ablated:
        assert median_ttft_s(simulate([batch, urgent], seconds, fair=False)["urgent"]) > 1
    # With urgent requests alone at more than the cluster serves, the batch still gets its floor.
    served = simulate([batch, Sender("urgent", 1.5 * CAPACITY, outputs=SHORT, ends=False)], seconds)
    firsts = [
        name
        for name, runs in served.items()
        for run in runs
        if run.served.ttft_s is not None and seconds / 4 < run.served.arrived_s + run.served.ttft_s
    ]
    assert 0.05 <= firsts.count("batch") / len(firsts) <= 0.15
