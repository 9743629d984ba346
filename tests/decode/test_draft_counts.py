"""Decode steps and drafts of a sequence: read from its slot's line, and sent with its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.decode_pb2 import ReserveRequest, SequenceOutput
from baton.v1.engine_pb2 import EngineCommand, EngineEvent, ReservedEvent
from baton.v1.types_pb2 import Attempt, DraftCounts, FinishReason, TraceParent
from services.common.engine.client import EngineClient
from services.common.processes.drain import Drain
from services.decode.servicer import DecodeServicer
from tests.support.kept_spans import KeptSpans

ROUTER = b"r" * 16
SLOT, GENERATION = 1, 7


class Engine:
    """The engine's end of a slot, whose line the next sequence writes when the front has reported an end."""

    def __init__(self, rings: SharedRings, memory: SharedMemory) -> None:
        self.ring, self.progress = rings.writer(memory), rings.progress(memory)
        self.ended = 0

    async def call(
        self, command: EngineCommand, on_answer: Callable[[EngineEvent], None] | None = None
    ) -> EngineEvent:
        reserved = EngineEvent(reserved=ReservedEvent(slot=SLOT, generation=GENERATION))
        assert on_answer is not None
        on_answer(reserved)
        return reserved

    async def send(self, command: EngineCommand) -> None:
        assert command.HasField("slot_ended")
        self.ended += 1
        self.step([], Finish.NONE, GENERATION + 1, (99, 99, 99, 99, 99))

    def step(self, tokens: list[int], finish: Finish, generation: int, counts: tuple[int, ...]) -> None:
        self.progress.publish([SLOT], [generation], [5], [counts])
        ends = [Finish.NONE] * (len(tokens) - 1) + [finish]
        for token, why in zip(tokens, ends, strict=False):
            self.ring.write([token], [SLOT], [generation], [why.value])


class Worker:
    """A front of one slot."""

    def __init__(
        self, kept: KeptSpans, prediction: tuple[int, ...] = (), *, always: bool = False, rows: int = 3
    ) -> None:
        rings = SharedRings(2, rows_per_slot=rows)
        memory = SharedMemory.create("test-drafts", rings.size)
        self.engine = Engine(rings, memory)
        self.stepped = Wakeup()
        self.servicer = DecodeServicer(
            b"i" * 16,
            cast(EngineClient, self.engine),
            rings.reader(memory),
            rings.progress(memory),
            self.stepped,
            Drain(),
            reports_output=False,
            spans=kept.recorder,
            speculates=rows > 1,
        )
        self.servicer.streams.follow(ROUTER)
        self._request = ReserveRequest(
            attempt=Attempt(request_id=b"q" * 16, number=1),
            router_id=ROUTER,
            prediction_token_ids=prediction,
            counts_in_every_message=always,
            trace=TraceParent(trace_id=b"t" * 16, span_id=b"p" * 8),
        )

    async def reserve(self) -> None:
        await self.servicer.Reserve(self._request, cast(Any, None))

    async def outputs(self) -> list[SequenceOutput]:
        """Returns the outputs that the router is sent for the words in the ring."""
        await self.servicer.read_ring()
        found: list[SequenceOutput] = []
        while (message := self.servicer.streams.collect(ROUTER, 1)) is not None:
            found += message.outputs
        return found


@pytest.mark.parametrize(
    ("reservation", "always"),
    [
        ({}, False),
        ({"prediction": (5, 6)}, True),
        ({"always": True}, True),
        ({"prediction": (5, 6), "always": True, "rows": 1}, False),  # of a worker without drafts
    ],
)
async def test_the_last_message_has_the_counts(reservation: dict[str, Any], *, always: bool) -> None:
    """The earlier messages have them too where that is asked for."""
    kept = KeptSpans()
    worker = Worker(kept, **reservation)
    await worker.reserve()
    worker.engine.step([4, 5], Finish.NONE, GENERATION, (1, 2, 1, 2, 1, 0, 0))
    (first,) = await worker.outputs()
    assert first.HasField("drafts") == always
    worker.engine.step([6, 7, 8], Finish.LENGTH, GENERATION, (2, 6, 4, 3, 2, 2, 1))
    (last,) = await worker.outputs()
    assert last.finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert last.drafts == DraftCounts(steps=3, drafts=8, accepted=5, drafts_predicted=5, accepted_predicted=3)
    assert worker.engine.ended == 1
    (span,) = kept.all()
    assert span.attributes["baton.tokens_per_step"] == pytest.approx(8 / 3, abs=1e-3)
    assert span.attributes["baton.decode_steps"] == 3
    worker.stepped.close()


async def test_where_no_step_has_run_there_are_none() -> None:
    kept = KeptSpans()
    worker = Worker(kept, (5,))
    await worker.reserve()
    worker.engine.step([], Finish.NONE, GENERATION - 1, (99, 99, 99, 99, 99))  # of the slot's last sequence
    worker.engine.ring.write([4], [SLOT], [GENERATION], [Finish.STOP.value])
    (last,) = await worker.outputs()
    assert not last.HasField("drafts")
    assert "baton.decode_steps" not in kept.all()[0].attributes
    worker.stepped.close()


async def test_a_reopened_stream_has_them_again() -> None:
    worker = Worker(KeptSpans())
    await worker.reserve()
    worker.engine.step([4, 5], Finish.LENGTH, GENERATION, (2, 1, 0, 0, 0))
    assert len(await worker.outputs()) == 1
    worker.servicer.streams.follow(ROUTER)
    (again,) = await worker.outputs()
    assert again.drafts == DraftCounts(steps=2, drafts=1)
    worker.stepped.close()
