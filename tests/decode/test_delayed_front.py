"""A front that is preempted anywhere: the engine's answers and the output ring reach it in any order.

What is injected: a seeded order of turns of the engine, looks of the front into the ring, and deliveries of
the engine's answers, which the front's event loop reads from a socket. Each token must come, the same as
without delays, and each canary generation must end well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from baton.engine.shared_memory.output_ring import Finish, Record
from baton.v1.engine_pb2 import CancelCommand, EngineCommand, EngineEvent, SlotEndedCommand
from baton.v1.types_pb2 import Attempt
from services.common.engine.channel import FrontEnd
from services.common.engine.client import EngineClient
from services.common.processes.drain import Drain
from services.decode.servicer import DecodeServicer
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

ROUTER = b"r" * 16
OUTPUT_TOKENS = 6
STEPS, FULL_STEPS = 450, 700


@dataclass(eq=False)
class Channel:
    """The front's end of the engine's socket; the test delivers the events."""

    engine: SteppedEngine
    delivered: int = 0
    events: asyncio.Queue[EngineEvent] = field(default_factory=asyncio.Queue)

    async def send(self, command: EngineCommand) -> None:
        self.engine.write(command)

    async def receive(self) -> EngineEvent:
        return await self.events.get()

    def deliver(self) -> None:
        for event in self.engine.events[self.delivered :]:
            self.events.put_nowait(event)
        self.delivered = len(self.engine.events)


class Front:
    """The real servicer and client over an engine that the test steps."""

    def __init__(self, engine: SteppedEngine) -> None:
        self.engine = engine
        self.channel = Channel(engine)
        self.client = EngineClient(cast(FrontEnd, self.channel))
        self.servicer = DecodeServicer(
            b"i" * 16,
            self.client,
            engine.ring,
            engine.progress,
            engine.stepped,
            Drain(),
            reports_output=True,
        )
        self.servicer.streams.follow(ROUTER)
        self.tokens: dict[bytes, list[int]] = {}
        self.ended: dict[bytes, asyncio.Event] = {}
        self.canaries = 0

    async def canary(self) -> None:
        await self.servicer.run_canary()
        self.canaries += 1

    async def request(self, name: bytes, *, given_up: bool) -> None:
        """A request that this worker prefills itself, or a reservation that is given up."""
        asked = reserve(name=name, most=OUTPUT_TOKENS)
        reserved = await self.servicer.Reserve(asked, cast(Any, None))
        if given_up:
            await self.client.call(EngineCommand(cancel=CancelCommand(attempt=asked.attempt)))
            return
        self.ended[name] = asyncio.Event()
        command = EngineCommand(prefill=prefill(reserved.ticket, name=name, most=OUTPUT_TOKENS))
        async for _ in self.client.stream(command):
            pass
        await self.ended[name].wait()

    async def look(self) -> None:
        """One look into the ring, and a router's."""
        await self.servicer.read_ring()
        while (message := self.servicer.streams.collect(ROUTER, 1)) is not None:
            for output in message.outputs:
                name = output.attempt.request_id[:1]
                tokens = self.tokens.setdefault(name, [])
                assert output.first_number == len(tokens)
                tokens += output.token_ids
                if output.finish_reason and name in self.ended:
                    self.ended[name].set()

    async def run(self, draw: random.Random | None, names: Iterator[int], steps: int) -> None:
        """Steps everything, in the order drawn; None: the front never waits."""
        dispatching = asyncio.create_task(self.client.run(self.servicer.on_event))
        running: set[asyncio.Task[None]] = set()
        canary: asyncio.Task[None] | None = None
        for step in range(steps):
            if canary is None or canary.done():
                canary = asyncio.create_task(self.canary())
                running.add(canary)
            if len(running) < 2 and step < steps - 200:
                number = next(names)
                request = self.request(bytes([number]), given_up=number % 3 == 0)
                running.add(asyncio.create_task(request))
            action = "all" if draw is None else draw.choice(("turn", "look", "deliver"))
            if action in ("turn", "all"):
                self.engine.turn(1 if draw is None else draw.randint(1, 4))
            if action in ("deliver", "all"):
                self.channel.deliver()
                await asyncio.sleep(0)
            if action in ("look", "all"):
                await self.look()
            for _ in range(3):
                await asyncio.sleep(0)
            for task in [one for one in running if one.done()]:
                running.discard(task)
                task.result()
            assert not dispatching.done()
        dispatching.cancel()
        for task in running:
            task.cancel()
        await asyncio.gather(dispatching, *running, return_exceptions=True)


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, STEPS), *(pytest.param(seed, FULL_STEPS, marks=pytest.mark.slow) for seed in range(2))],
)
async def test_any_order_of_answers_and_output(seed: int, steps: int, tmp_path: Path) -> None:
    outputs = []
    for draw in (None, random.Random(seed)):
        folder = tmp_path / str(draw is None)
        folder.mkdir()
        engine = SteppedEngine(folder, "both")
        front = Front(engine)
        await front.run(draw, iter(range(256)), steps)
        assert front.canaries > 10
        assert front.servicer.unknown_sequences == 0
        assert len(front.ended) > 10
        outputs.append({name: front.tokens[name] for name in front.ended if front.ended[name].is_set()})
        engine.close()
    undisturbed, delayed = outputs
    assert delayed
    assert all(tokens == next(iter(undisturbed.values())) for tokens in delayed.values())
    assert {len(tokens) for tokens in delayed.values()} == {OUTPUT_TOKENS}


async def test_an_unknown_sequence_ends_by_itself_and_frees_its_slot(tmp_path: Path) -> None:
    engine = SteppedEngine(tmp_path, "both")
    front = Front(engine)
    sent: list[SlotEndedCommand] = []

    async def send(command: EngineCommand) -> None:
        sent.append(command.slot_ended)

    front.client.send = send  # type: ignore[method-assign]
    attempt = Attempt(request_id=b"q" * 16, number=1)
    front.servicer.streams.reserve(attempt, ROUTER, 0, slot=0, generation=1)
    engine.ring.read = lambda limit=4096: [  # type: ignore[method-assign]
        Record(1, 9, 5, Finish.NONE),
        Record(0, 1, 7, Finish.NONE),
        Record(1, 9, 6, Finish.LENGTH),
        Record(0, 1, 8, Finish.LENGTH),
    ]
    assert await front.servicer.read_ring()
    assert front.servicer.unknown_sequences == 1
    assert [(one.slot, list(one.token_ids)) for one in sent] == [(1, []), (0, [7, 8])]
    engine.close()
