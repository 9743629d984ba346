"""Workers freeze, die and are cut off, and no supervisor watches them: the router alone goes on elsewhere.

Injected one at a time, by `Strikes.strike`: SIGKILL and SIGSTOP of a front or an engine, a proxy between
router and worker that swallows bytes while its sockets stay open, and stalls under a second, which must be
ridden out. The reduced run is one of `two_pairs/test_detection.py`, whose workers it shares. Clients stream
meanwhile. Every token is compared with the truth, no request is lost, the longest gap of a stream is bounded,
and what router and workers hold afterwards is what they held before.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from services.common.config.types import Role
from tests.e2e.faults.soak_asks import Api, Ask
from tests.e2e.faults.soak_clients import Clients, Outcome, draw_asks
from tests.e2e.faults.soak_truth import Truth
from tests.e2e.faults.unsupervised import SHORT, Fault, Strikes
from tests.e2e.support.cluster import leaks
from tests.e2e.support.ledger import process_account, router_counters
from tests.e2e.support.workers import Loose, loose_workers
from tests.support.checkpoints import make_checkpoint

ENGINE = {"dtype": "float64", "slots": 16, "chunk_tokens": 64, "block_tokens": 16}
ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
# What a client may see of a fault: it is noticed within 3 s, and acted on.
NOTICED_S = 3.5
QUIET_S = 15.0
# Pools of threads and descriptors that grow with the crowd a process has met.
_SPARE = 8


@dataclass(frozen=True)
class Size:
    """The number of requests, at most `at_once` of them at a time with a pause after each round, and the
    faults that must strike."""

    requests: int
    faults: tuple[Fault, ...]
    rounds: int
    at_once: int
    pause_s: float


FULL = Size(1000, tuple(Fault), 4, at_once=8, pause_s=0.0)
REDUCED = Size(12, (Fault.HALF_OPEN_BOTH,), 1, at_once=2, pause_s=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=13)


def asks_of(seed: int, count: int) -> list[Ask]:
    """Requests that stay to their end; streams, whose gaps can be measured."""
    apis = itertools.cycle((Api.GRPC, Api.EVENTS))
    return [replace(ask, leave=None, api=next(apis)) for ask in draw_asks(seed, count)]


async def run_beside_faults(strikes: Strikes, size: Size, seed: int) -> list[Outcome]:
    """Clients ask until all of the requests are answered and each fault has struck."""
    outcomes: list[Outcome] = []
    async with Clients.of(strikes.loose.cluster) as clients:
        striking = asyncio.create_task(strike_all(strikes, size, seed))
        for round_ in itertools.count():
            outcomes += await clients.all(asks_of(seed + round_, 4 * size.at_once), size.at_once)
            if striking.done() and len(outcomes) >= size.requests:
                break
            await asyncio.sleep(size.pause_s)
        await striking
    return outcomes


async def strike_all(strikes: Strikes, size: Size, seed: int) -> None:
    """The reduced run: each fault once, at either role. The full one: four times at each role."""
    dice = random.Random(seed)
    for _ in range(size.rounds):
        due = [(fault, role) for fault in size.faults for role in ("prefill", "decode")]
        due = due if size.rounds > 1 else due[::2]
        dice.shuffle(due)
        for fault, role in due:
            await strikes.strike(fault, f"{role}-{dice.randrange(2)}")
            await asyncio.sleep(dice.uniform(0.2, 1.0))


def descriptors(loose: Loose) -> dict[str, Counter[str]]:
    """Open descriptors by kind, of the router and of each front."""
    pids = {"router": loose.cluster.process.pid}
    pids |= {f"{one.name} front": one.front.pid for one in loose.workers.values()}
    return {name: process_account(pid).descriptors for name, pid in pids.items()}


async def settle(loose: Loose, before: dict[str, Counter[str]] | None) -> dict[str, Counter[str]]:
    """Waits until nothing is held and descriptors are as `before`."""
    deadline = time.monotonic() + QUIET_S
    while True:
        workers = loose.workers.values()
        held = [f"{one.name}: {leak}" for one in workers for leak in leaks(await one.report())]
        held += await router_counters(loose.cluster)
        now = descriptors(loose)
        for name, counts in now.items():
            more = counts - (before or now)[name]
            held += [f"{name}: {dict(more)} more descriptors"] if more.total() > _SPARE else []
        if not held:
            return now
        assert time.monotonic() < deadline, f"after {QUIET_S} s: {held}"
        await asyncio.sleep(0.2)


async def prove(loose: Loose, model: Path, size: Size) -> Strikes:
    strikes = Strikes(loose, random.Random(7))
    async with Clients.of(loose.cluster) as clients:
        calm = await clients.all(asks_of(5, 2 * size.at_once), size.at_once)
    prefill_s = max(one.longest_gap_s for one in calm)
    before = await settle(loose, None)
    outcomes = await run_beside_faults(strikes, size, seed=101)
    await settle(loose, before)
    truth = Truth(model)
    for one in outcomes:
        assert one.ending == "whole", f"lost: {one}"
        truth.judge(one)
    longest = max(one.longest_gap_s for one in outcomes)
    summary = (
        f"{len(outcomes)} requests, attempts {dict(Counter(one.attempts for one in outcomes))}; struck "
        f"{ {fault.value: count for fault, count in strikes.struck.items()} }; {strikes.restarts} restarts; "
        f"false alarms {strikes.false_alarms}; longest gap {longest:.2f} s, without faults {prefill_s:.2f} s"
    )
    print(f"\nPROOF unsupervised: {summary}")
    assert strikes.struck.keys() >= set(size.faults)
    assert not strikes.false_alarms
    assert longest <= NOTICED_S + prefill_s, summary
    return strikes


@pytest.fixture
def loose(model: Path) -> Iterator[Loose]:
    with loose_workers(model, *ROLES, proxied=True, engine=ENGINE) as loose:
        yield loose


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_thousand_requests_beside_faults(model: Path, loose: Loose) -> None:
    strikes = await prove(loose, model, FULL)
    assert sum(strikes.struck[fault] for fault in SHORT) >= 16
