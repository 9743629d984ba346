"""Clients leave at every stage and workers are killed, over and over: no wrong token, no silence, no leak.

Injected: clients that cancel, close their connection or set a deadline, at a random time or a chosen
token; SIGKILL of a worker's front or engine; short stops of either. Shown to have taken effect: the router's
log has the stage in which each abandoned request was, a killed worker is gone and another incarnation serves.
Then the ledgers of before and after are compared, and every token is held against the truth.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.e2e.faults.soak_asks import Ask
from tests.e2e.faults.soak_clients import Clients, Outcome, draw_asks
from tests.e2e.faults.soak_faults import Faults
from tests.e2e.faults.soak_truth import Truth
from tests.e2e.support.cluster import WITHOUT_RAY, Cluster, baton_up
from tests.e2e.support.ledger import Ledger, quiesces
from tests.support.checkpoints import make_checkpoint

FLAGS = ("--dtype", "float64", "--slots", "4", "--chunk-tokens", "16", "--block-tokens", "16")
TOPOLOGIES = {"2+2": ("--prefill", "2", "--decode", "2"), "both": ("--both", "2")}
Draw = Callable[[int, int], list[Ask]]
"""Draws requests by a seed and their number."""
AT_ONCE = 12
# From the last client's leaving until nothing is held and all is as before.
QUIET_S = 10.0
# Tombstones of cancelled attempts are kept for 30 s.
FORGOTTEN_S = 35.0
# Where a request can be when its client leaves. `ended`, after its last token, is reported by the client.
STAGES = {"admitted", "reserved", "prefilling", "first_token", "handed_off", "decoding", "ended"}
# More requests that are all given up, so many at a time, until each stage was struck.
VOLLEY, MOST_VOLLEYS = 40, 10
# Lines of the log that only a fault of ours writes.
FAULTS_OF_OURS = (
    "Traceback",
    "request_internal_error",
    "watch_task_failed",
    "http_internal_error",
    "prefill_reader_failed",
    "was never retrieved",
    "was never awaited",
    "came twice and differs",
    "never came",
)


@dataclass(frozen=True)
class Size:
    """The number of requests, and of requests between two kills of a worker."""

    requests: int
    every: int
    # Where the others keep the cores busy a worker takes its time to come back, and none dies meanwhile.
    least_kills: int
    # Those that must be struck; the others last a few milliseconds, and take many requests to be met.
    stages: frozenset[str]


FULL = Size(requests=1000, every=60, least_kills=5, stages=frozenset(STAGES))
REDUCED = Size(requests=40, every=25, least_kills=1, stages=frozenset({"admitted", "prefilling", "decoding"}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=13)


@dataclass(frozen=True)
class Soaked:
    """Answers, faults and counters of a soak."""

    outcomes: list[Outcome]
    faults: Faults
    stages: Counter[str]
    quiet_s: float

    def __str__(self) -> str:
        endings = Counter(one.ending for one in self.outcomes)
        again = [until - since for since, until in self.faults.away]
        return (
            f"{len(self.outcomes)} requests: {dict(endings)}; left at {dict(self.stages)}; killed "
            f"{dict(self.faults.kills)}, all serving again after {min(again, default=0):.1f} to "
            f"{max(again, default=0):.1f} s; {self.faults.stops} stops; attempts "
            f"{dict(Counter(one.attempts for one in self.outcomes))}; quiet after {self.quiet_s:.1f} s"
        )


async def soak(cluster: Cluster, size: Size, seed: int, draw: Draw) -> Soaked:
    """Everything but the tokens is checked here."""
    await acquaint(cluster)
    before = await quiesces(cluster, None, QUIET_S)
    faults = Faults(cluster, random.Random(seed), size.every)
    async with faults.at_work(), Clients.of(cluster) as clients:
        outcomes = await clients.all(draw(seed, size.requests), AT_ONCE, faults.request_ended)
        for volley in range(MOST_VOLLEYS):
            if struck(cluster, outcomes).keys() >= size.stages:
                break
            leaving = [ask for ask in draw(seed + 1 + volley, 5 * VOLLEY) if ask.leave is not None]
            outcomes += await clients.all(leaving[:VOLLEY], AT_ONCE, faults.request_ended)
    quiet_s = await as_before(cluster, before)
    check_endings(outcomes, faults)
    return Soaked(outcomes, faults, struck(cluster, outcomes), quiet_s)


async def acquaint(cluster: Cluster) -> None:
    """A crowd that stays, until every worker has met every other: links, channels and pools are there."""
    for round_ in range(20):
        async with Clients.of(cluster) as clients:
            asks = [ask for ask in draw_asks(round_, 4 * AT_ONCE) if ask.leave is None]
            await clients.all(asks[:AT_ONCE], AT_ONCE)
        reports = await cluster.reports()
        receivers = sum(name.startswith("decode") for name in reports)
        links = [len(report.links) for name, report in reports.items() if name.startswith("prefill")]
        if all(count == receivers for count in links):
            return
    raise AssertionError("some workers never met")


async def as_before(cluster: Cluster, before: Ledger) -> float:
    """Checks the ledger; the seconds until nothing was held."""
    since = time.monotonic()
    await quiesces(cluster, None, QUIET_S)
    quiet_s = time.monotonic() - since
    await acquaint(cluster)
    await quiesces(cluster, before, QUIET_S)
    return quiet_s


async def tombstones_go(cluster: Cluster) -> None:
    async with asyncio.timeout(FORGOTTEN_S):
        while any(one.tombstones for one in (await cluster.reports()).values()):  # noqa: ASYNC110
            await asyncio.sleep(0.5)


def struck(cluster: Cluster, outcomes: Sequence[Outcome]) -> Counter[str]:
    """Counts the stages that requests were in when their clients left or their deadlines passed."""
    log = cluster.log.read_text()
    stages = Counter(
        re.findall(r"event='request_ended'.* outcome='(?:cancelled|deadline)' stage='(\w+)'", log)
    )
    stages["ended"] = sum(
        one.ending == "left" and all(output.finish for output in one.choices) for one in outcomes
    )
    return +stages


def check_endings(outcomes: Sequence[Outcome], faults: Faults) -> None:
    """Asserts that each client that stayed has the whole answer, or an error while a worker was away."""
    for one in outcomes:
        if one.ending not in ("whole", "left", "deadline"):
            assert faults.explains(one.began, one.ended), f"no death explains {one}"
    stayed = [one for one in outcomes if one.ask.leave is None]
    assert sum(one.ending == "whole" for one in stayed) >= 0.9 * len(stayed)


def check_tokens(model: Path, outcomes: Sequence[Outcome]) -> None:
    truth = Truth(model)
    for one in outcomes:
        truth.judge(one)


async def prove(cluster: Cluster, model: Path, size: Size, draw: Draw = draw_asks) -> None:
    soaked = await soak(cluster, size, 31, draw)
    print(soaked)
    assert soaked.stages.keys() >= size.stages, "some stage was never struck"
    assert sum(soaked.faults.kills.values()) >= size.least_kills
    log = cluster.log.read_text()
    assert not [line for line in log.splitlines() if any(fault in line for fault in FAULTS_OF_OURS)]
    check_tokens(model, soaked.outcomes)


def draw_alike(seed: int, count: int) -> list[Ask]:
    """Requests of few prompts, each a few tokens over and over: guesses are found in a sequence's own text,
    and in the outputs of others that were asked the same."""
    known = [
        replace(ask, prompt=(ask.prompt[:5] * len(ask.prompt))[: len(ask.prompt)]) for ask in draw_asks(0, 30)
    ]
    return [
        replace(known[number % len(known)], api=ask.api, leave=ask.leave)
        for number, ask in enumerate(draw_asks(seed, count))
    ]


async def drafts_were_verified(cluster: Cluster) -> None:
    """Asserts that decode workers, since their last starts, have refused and accepted drafts of each
    source."""
    for source in ("text", "table"):
        of_all = [
            drafts
            for report in (await cluster.reports()).values()
            for drafts in report.drafts
            if drafts.source == source
        ]
        assert sum(sum(drafts.rows) for drafts in of_all) > sum(sum(drafts.accepted) for drafts in of_all) > 0


async def test_clients_leave_and_workers_die(model: Path) -> None:
    with baton_up(model, *FLAGS, *TOPOLOGIES["both"]) as cluster:
        await prove(cluster, model, REDUCED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("topology", "ray"), [("2+2", WITHOUT_RAY), ("both", WITHOUT_RAY), ("2+2", "local")])
async def test_a_thousand_requests(model: Path, topology: str, ray: str) -> None:
    # Where the ticket follows the prompt, no request is caught while it waits for a ticket.
    rare = {"reserved"} if topology == "2+2" else set[str]()
    with baton_up(model, *FLAGS, *TOPOLOGIES[topology], ray=ray) as cluster:
        await prove(cluster, model, replace(FULL, stages=FULL.stages - rare))
        await tombstones_go(cluster)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("topology", "drafts"), [("2+2", "lookup"), ("both", "auto")])
async def test_a_thousand_requests_beside_drafts(model: Path, topology: str, drafts: str) -> None:
    """The tables of workers that die are lost, and the drafts of their sequences; no token is another one."""
    config = f"engine: {{speculation: {drafts}, lookahead_table_mb: 1}}"
    with baton_up(model, *FLAGS, *TOPOLOGIES[topology], config=config) as cluster:
        await prove(cluster, model, replace(FULL, stages=FULL.stages - {"reserved"}), draw_alike)
        await drafts_were_verified(cluster)
        await tombstones_go(cluster)
