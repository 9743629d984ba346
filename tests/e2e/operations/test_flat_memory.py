"""Thousands of short requests over both APIs, some of them cancelled, and no process grows with them.

Memory is what a process has allocated and touched (RssAnon + RssShmem). What grows to a bound of its own has
done so before the first sample: the tombstones of 30 s, the last 4096 answers that a receiver remembers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.engine.sequence import SamplingParams
from tests.e2e.faults.soak_asks import Api, Ask, Leave, Way
from tests.e2e.faults.soak_clients import Clients, Outcome
from tests.e2e.support.cluster import Cluster, assert_all_free, baton_up
from tests.e2e.support.ledger import processes, resident_kib
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.flatness import Flat, Sample, growth, slope

TOPOLOGIES = {"1+1": ("--prefill", "1", "--decode", "1"), "both": ("--both", "1")}


@dataclass(frozen=True)
class Size:
    """The number of requests, `at_once` side by side, with a sample after each `every` of them, and the
    memory that must be flat."""

    warm_up: int
    requests: int
    every: int
    flat: Flat
    at_once: int = 16


FULL = Size(warm_up=5000, requests=5000, every=100, flat=Flat())
# Too short for a small leak: one that keeps whole requests would show.
REDUCED = Size(warm_up=150, requests=200, every=10, flat=Flat(kib_a_request=10.0, growth=0.1), at_once=32)


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=17)


def short_asks(dice: random.Random, count: int) -> Iterator[Ask]:
    """Eight tokens in, three out, every API; one of ten goes away with the first token."""
    for number in range(count):
        api = list(Api)[number % 3]
        leaves = api is not Api.WHOLE and number % 20 < 3
        way = Way.CANCEL if api is Api.GRPC else Way.DISCONNECT
        yield Ask(
            api=api,
            prompt=tuple(dice.randrange(VOCAB_SIZE) for _ in range(8)),
            params=SamplingParams(temperature=float(number % 2), seed=number),
            max_tokens=3,
            leave=Leave(way, at_token=1) if leaves else None,
        )


async def measure(cluster: Cluster, size: Size) -> dict[str, list[Sample]]:
    """The memory of every process, by its place in the cluster."""
    dice = random.Random(23)
    async with Clients.of(cluster) as clients:
        pids = processes(cluster, await cluster.reports())
        await clients.all(list(short_asks(dice, size.warm_up)), size.at_once)
        samples: dict[str, list[Sample]] = {place: [] for place in pids}
        ended = 0

        def sample(outcome: Outcome) -> None:
            nonlocal ended
            assert outcome.ending in ("whole", "left"), outcome
            if ended % size.every == 0:
                for place, pid in pids.items():
                    samples[place].append(Sample(ended, resident_kib(pid)))
            ended += 1

        await clients.all(list(short_asks(dice, size.requests + 1)), size.at_once, sample)
        await assert_all_free(cluster, 5.0)
        assert processes(cluster, await cluster.reports()) == pids, "some process was started again"
    return samples


async def prove(cluster: Cluster, size: Size) -> None:
    samples = await measure(cluster, size)
    broken = {}
    for place, memory in samples.items():
        print(
            f"{place:24} {memory[0].kib:7} KiB at first, {memory[-1].kib:7} at last, {growth(memory):+.2%}, "
            f"{slope(memory):+.3f} KiB a request"
        )
        if found := size.flat.broken_by(memory):
            broken[place] = (found, [sample.kib for sample in memory])
    assert not broken, broken


async def test_a_few_hundred_requests(cluster: Cluster) -> None:
    await prove(cluster, REDUCED)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_five_thousand_requests(own_model: Path, topology: str) -> None:
    with baton_up(own_model, "--dtype", "float32", *TOPOLOGIES[topology]) as cluster:
        await prove(cluster, FULL)
