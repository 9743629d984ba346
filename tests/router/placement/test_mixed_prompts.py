"""Short and long prompts with limits, in virtual time: the real queue, placement and early refusal before a
prefill worker with the engine's own scheduler. What is let in is in time, and short prompts are not refused
for long ones that they would not wait for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from services.router.placement.placement import Placement
from services.router.request.slo import Slo
from services.router.workers.backlog import Backlog, Prompt, PromptWait
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import COSTS, Cluster, Machine, Served
from tests.router.workers.bare_workers import pools_of
from tests.support.fewer import WITHOUT_THE_RULE

SHORT, LONG = 256, 8192
TPOT_S = 0.05


@dataclass(frozen=True)
class Mix:
    """Prompts by their tokens: the share of requests, and the limit of the time to the first token."""

    share: dict[int, float]
    ttft_s: dict[int, float]

    def rate(self, load: float) -> float:
        """Requests a second that take `load` of one prefill worker's time."""
        seconds = sum(share * COSTS.prompt_s(tokens) for tokens, share in self.share.items())
        return load / seconds


def one_process(machines: list[Machine]) -> Cluster:
    return Cluster(
        machines, lambda found, workers: Placement(found, pools_of(workers), 2048, refuse_late=True)
    )


def served(
    mix: Mix,
    load: float,
    seconds: float = 10.0,
    seed: int = 2,
    make: Callable[[list[Machine]], Cluster] = one_process,
) -> list[tuple[int, Served]]:
    """The tokens of each prompt, and what its request got. `make`: of the router's processes, to which
    requests go at random."""

    async def main() -> list[tuple[int, Served]]:
        cluster = make([Machine("prefill", by_slack=True), Machine("decode", slots=512)])
        processes = random.Random(9)
        draw, loop = random.Random(seed), asyncio.get_running_loop()
        requests: list[tuple[int, asyncio.Task[Served]]] = []
        at = 0.0
        while (at := at + draw.expovariate(mix.rate(load))) < seconds:
            await asyncio.sleep(at - loop.time())
            tokens = draw.choices(list(mix.share), list(mix.share.values()))[0]
            slo = Slo(mix.ttft_s[tokens], TPOT_S)
            process = processes.randrange(len(cluster.queues))
            requests.append((tokens, asyncio.create_task(cluster.serve(process, slo, tokens, 32))))
        return [(tokens, await request) for tokens, request in requests]

    return run_virtual(main())


def in_time(mix: Mix, of: list[tuple[int, Served]]) -> float:
    met = [one.meets(Slo(mix.ttft_s[tokens], TPOT_S)) for tokens, one in of]
    return sum(met) / len(met)


def let_in(of: list[tuple[int, Served]]) -> list[tuple[int, Served]]:
    return [(tokens, one) for tokens, one in of if one.refused_s is None]


MIXED = Mix({SHORT: 0.9, LONG: 0.1}, {SHORT: 0.25, LONG: 1.5})
UNIFORM = Mix({1024: 1.0}, {1024: 0.5})


def as_they_came(
    self: Backlog, seconds: float, left_s: float | None = None, queued: object = ()
) -> PromptWait:
    """The prediction that prompts are computed as they came."""
    assert isinstance(queued, list | tuple)
    return PromptWait(self.wait_s + sum(one.seconds for one in queued if isinstance(one, Prompt)))


@WITHOUT_THE_RULE
def test_short_prompts_are_not_refused_for_long_ones(monkeypatch: pytest.MonkeyPatch, ablated: bool) -> None:
    """Hardly any request is refused at the rate that the worker sustains. A third of the short prompts would
    be if their first tokens were predicted first come, first served."""
    assert in_time(MIXED, served(MIXED, 1.0)) >= 0.98
    if not ablated:
        return
    monkeypatch.setattr(Backlog, "wait_of", as_they_came)
    assert in_time(MIXED, served(MIXED, 1.0)) < 0.8


@WITHOUT_THE_RULE
def test_what_is_let_in_under_overload_is_in_time(monkeypatch: pytest.MonkeyPatch, ablated: bool) -> None:
    over = served(MIXED, 1.3)
    assert in_time(MIXED, let_in(over)) >= 0.98
    if not ablated:
        return
    monkeypatch.setattr(Backlog, "wait_of", as_they_came)
    assert in_time(MIXED, over) >= 1.5 * in_time(MIXED, served(MIXED, 1.3))


def test_prompts_of_one_length_are_served_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    by_order = served(UNIFORM, 1.3, 4)
    monkeypatch.setattr(Backlog, "wait_of", as_they_came)
    assert in_time(UNIFORM, by_order) >= in_time(UNIFORM, served(UNIFORM, 1.3, 4)) - 0.01
    assert in_time(UNIFORM, let_in(by_order)) == 1
