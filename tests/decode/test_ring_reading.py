"""Times at which the front reads the output ring: as soon as the engine has ended a step, and at intervals
without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import RingWriter
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.engine_pb2 import EngineCommand, EngineEvent, ReservedEvent
from baton.v1.types_pb2 import Attempt
from services.common.engine.client import EngineClient
from services.common.processes.drain import Drain
from services.decode.servicer import DecodeServicer
from tests.support.waiting import until

_NEVER_S = 3600.0


class Engine:
    """An engine that grants one slot to every reservation."""

    async def call(
        self, command: EngineCommand, on_answer: Callable[[EngineEvent], None] | None = None
    ) -> EngineEvent:
        reserved = EngineEvent(reserved=ReservedEvent(slot=1, generation=7))
        assert on_answer is not None
        on_answer(reserved)
        return reserved


class Worker:
    """A front with one reservation, and the engine's ends of ring and wakeup."""

    def __init__(self) -> None:
        rings = SharedRings(2)
        memory = SharedMemory.create("test-ring", rings.size)
        self.writer: RingWriter = rings.writer(memory)
        self.stepped = Wakeup()
        self.servicer = DecodeServicer(
            b"i" * 16,
            cast(EngineClient, Engine()),
            rings.reader(memory),
            rings.progress(memory),
            self.stepped,
            Drain(),
            False,
        )

    async def reserve(self) -> None:
        request = ReserveRequest(attempt=Attempt(request_id=b"q" * 16, number=1), router_id=b"r" * 16)
        await self.servicer.Reserve(request, cast(Any, None))

    def step(self, token: int) -> None:
        """Writes the words of one decode step."""
        self.writer.write([token], [1], [7], [0])

    async def read(self) -> None:
        """Returns once the ring's words have been taken."""
        await until(lambda: self.writer.room() == self.writer.capacity)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.stepped.close()


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[None]:
    await worker.reserve()
    task = asyncio.create_task(worker.servicer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_step_that_ends_is_read_at_once(worker: Worker) -> None:
    worker.servicer.poll_s = _NEVER_S
    async with running(worker):
        await asyncio.sleep(0.02)  # it has found nothing, and waits
        worker.step(11)
        worker.stepped.set()
        await worker.read()


async def test_a_step_that_ends_while_the_ring_is_read_is_not_missed(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.servicer.poll_s = _NEVER_S
    read, reads = worker.servicer.ring.read, [0]

    def reading(limit: int = 4096) -> list[object]:
        found = list[object](read(limit))
        if not reads[0]:  # just behind the look
            worker.step(11)
            worker.stepped.set()
        reads[0] += 1
        return found

    monkeypatch.setattr(worker.servicer.ring, "read", reading)
    async with running(worker):
        await until(lambda: reads[0] > 0)
        await worker.read()


async def test_a_step_that_the_engine_does_not_report_is_read_too(worker: Worker) -> None:
    async with running(worker):
        for token in (11, 12):
            worker.step(token)
            await worker.read()
    assert worker.servicer.poll_lag.count > 0
