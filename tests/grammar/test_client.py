"""Several mask processes of one worker: who computes what, and what remains when one ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.types_pb2 import Grammar
from services.grammar.client import MaskClient, mask_processes
from services.grammar.grammar_source import grammar_source
from services.grammar.launch import SlotKey
from services.grammar.process_client import MaskProcessClient
from tests.grammar.model import ids_of
from tests.grammar.worker import AB, LIMITS, WAIT_S, Worker

A, B = ids_of("ab")


class WorkerOfTwo(Worker):
    """A worker with two mask processes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, processes=2)
        self.client = MaskClient(self.setup, self.fail)

    async def start(self) -> None:
        """Returns once both processes run."""
        async with asyncio.timeout(WAIT_S):
            await self.client.next_mask(AB, LIMITS, ())
            await self.client.started()

    def process_of(self, key: SlotKey) -> MaskProcessClient:
        """The process that follows a sequence."""
        (process,) = (one for one in self.client.processes if one.follows(key))
        return process


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[WorkerOfTwo]:
    one = WorkerOfTwo(tmp_path)
    yield one
    await one.client.stop()


async def test_sequences_are_shared_and_each_gets_its_masks(worker: WorkerOfTwo) -> None:
    assert worker.client.pids == [], "they start with the first guided request"
    await worker.start()
    assert len(set(worker.client.pids)) == 2
    for slot in range(4):
        await worker.client.follow((slot, 1), 3, AB, LIMITS, ())
    assert [process.followed for process in worker.client.processes] == [2, 2]
    for position, (drawn, expected) in enumerate([(A, B), (B, A)], 4):
        for slot in range(4):
            worker.draw(slot, 1, drawn)
            found, _, at, allowed = await worker.next_mask()
            assert (found, at) == (slot, position)
            assert expected in allowed
    worker.client.close((0, 1))
    worker.client.close((2, 1))
    worker.client.ended((1, 1))
    assert (worker.client.followed, worker.client.opened, worker.client.failed) == (1, 5, 0)
    loads = [process.followed for process in worker.client.processes]
    await worker.client.follow((0, 2), 3, AB, LIMITS, ())
    assert worker.process_of((0, 2)) is worker.client.processes[loads.index(0)]


async def test_the_end_of_one_process_fails_its_sequences_alone_and_it_starts_again(
    worker: WorkerOfTwo,
) -> None:
    await worker.start()
    for slot in range(2):
        await worker.client.follow((slot, 1), 3, AB, LIMITS, ())
    before = worker.client.pids
    lost, kept = (worker.process_of((slot, 1)) for slot in range(2))
    assert lost.pid is not None
    os.kill(lost.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        assert await worker.failed.get() == (0, 1, ErrorKind.CONFLICT)
    assert lost.pid is None
    worker.draw(1, 1, A)
    assert (await worker.next_mask())[:3] == (1, 1, 4)
    # The process that runs takes the next attempt, while the other starts.
    await worker.client.follow((0, 2), 4, AB, LIMITS, ids_of("a"))
    assert [worker.process_of(key) for key in ((1, 1), (0, 2))] == [kept, kept]
    assert (lost.followed, kept.followed) == (0, 2)
    async with asyncio.timeout(WAIT_S):
        await worker.client.started()
    assert len(set(worker.client.pids)) == 2
    assert worker.client.pids != before
    assert (worker.client.restarts, worker.client.followed) == (1, 2)
    for _ in range(2):  # the second time it is followed already
        await worker.client.follow((3, 1), 3, AB, LIMITS, ())
    assert worker.process_of((3, 1)) is lost
    assert worker.client.followed == 3


async def test_a_grammar_that_is_refused_is_not_followed(worker: WorkerOfTwo) -> None:
    with pytest.raises(BatonError, match="cannot be used"):
        await worker.client.follow((0, 1), 3, grammar_source(Grammar(regex="(")), LIMITS, ())
    assert worker.client.followed == 0
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    worker.draw(0, 1, A)
    assert (await worker.next_mask())[:3] == (0, 1, 4)


@pytest.mark.parametrize(
    ("slots", "cores", "count"),
    [(1, 64, 1), (32, 2, 1), (32, 16, 4), (9, 16, 2), (256, 16, 4), (256, 128, 8)],
)
def test_how_many_by_slots_and_cores(
    slots: int, cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert mask_processes(slots) == count
