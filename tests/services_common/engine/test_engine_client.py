"""The front's end of the engine channel: order, callers that leave, an engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.engine_pb2 import (
    EngineCommand,
    EngineEvent,
    FailedEvent,
    PrefillEndedEvent,
    ReservedEvent,
    TicketEndedEvent,
)
from baton.v1.prefill_pb2 import FirstToken, PrefillRequest, PrefillResponse, PromptLogprobs
from baton.v1.worker_pb2 import DescribeRequest
from services.common.engine.channel import PROMPT_LOGPROBS_A_MESSAGE, ChannelClosedError, EngineEnd, FrontEnd
from services.common.engine.client import EngineClient


@dataclass
class Pair:
    """A client, and the engine's end of its channel for a test to play the engine."""

    client: EngineClient
    engine: EngineEnd
    run: asyncio.Task[BatonError]
    sock: socket.socket
    events: list[EngineEvent]  # those that answer no command

    async def command(self) -> EngineCommand:
        for _ in range(200):
            for command in self.engine.receive(1):
                return command
            await asyncio.sleep(0.005)
        raise AssertionError("no command came")


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = await FrontEnd.open(ours)
    client, events = EngineClient(channel), list[EngineEvent]()
    run = asyncio.create_task(client.run(events.append))
    yield Pair(client, EngineEnd(theirs), run, theirs, events)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    channel.close()
    theirs.close()


def reserve() -> EngineCommand:
    return EngineCommand(reserve=ReserveRequest())


async def test_answers_find_their_callers_in_any_order(pair: Pair) -> None:
    calls = [asyncio.create_task(pair.client.call(EngineCommand(describe=DescribeRequest()))) for _ in "ab"]
    first, second = await pair.command(), await pair.command()
    pair.engine.send(EngineEvent(id=second.id, reserved=ReservedEvent(slot=2)))
    pair.engine.send(EngineEvent(id=first.id, reserved=ReservedEvent(slot=1)))
    assert [event.reserved.slot for event in await asyncio.gather(*calls)] == [1, 2]


async def test_an_answer_is_delivered_before_the_events_behind_it(pair: Pair) -> None:
    call = asyncio.create_task(pair.client.call(reserve(), on_answer=pair.events.append))
    command = await pair.command()
    pair.engine.send(EngineEvent(id=command.id, reserved=ReservedEvent(slot=1)))
    pair.engine.send(EngineEvent(ticket_ended=TicketEndedEvent(slot=1)))
    await call
    await asyncio.sleep(0.05)
    assert [event.WhichOneof("event") for event in pair.events] == ["reserved", "ticket_ended"]


async def test_a_reservation_is_delivered_although_its_caller_was_cancelled(pair: Pair) -> None:
    answers: list[int] = []
    call = asyncio.create_task(
        pair.client.call(reserve(), on_answer=lambda event: answers.append(event.reserved.slot))
    )
    command = await pair.command()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    pair.engine.send(EngineEvent(id=command.id, reserved=ReservedEvent(slot=7)))
    await asyncio.sleep(0.05)
    assert answers == [7]


async def test_a_refusal_is_raised_and_delivers_no_answer(pair: Pair) -> None:
    answers: list[EngineEvent] = []
    call = asyncio.create_task(pair.client.call(reserve(), on_answer=answers.append))
    command = await pair.command()
    failed = FailedEvent(kind=ErrorKind.OVERLOADED.value, message="full")  # type: ignore[arg-type]
    pair.engine.send(EngineEvent(id=command.id, failed=failed))
    with pytest.raises(BatonError, match="full") as refused:
        await call
    assert refused.value.kind is ErrorKind.OVERLOADED
    assert answers == []


async def test_a_silent_engine_ends_a_call_at_its_deadline(pair: Pair) -> None:
    with pytest.raises(BatonError) as late:
        await pair.client.call(reserve(), timeout_s=0.05)
    assert late.value.kind is ErrorKind.DEADLINE


async def test_a_prefill_streams_until_its_end(pair: Pair) -> None:
    events: list[int] = []

    async def read() -> None:
        async for event in pair.client.stream(EngineCommand(prefill=PrefillRequest())):
            events.append(event.prefill.first_token.token_id)

    reader = asyncio.create_task(read())
    command = await pair.command()
    assert pair.client.prefills == 1
    first = PrefillResponse(first_token=FirstToken(token_id=5))
    pair.engine.send(EngineEvent(id=command.id, prefill=first))
    pair.engine.send(EngineEvent(id=command.id, prefill_ended=PrefillEndedEvent()))
    await asyncio.wait_for(reader, 5)
    assert events == [5]
    assert pair.client.prefills == 0


async def test_a_long_prompts_logprobs_never_overfill_their_queue(pair: Pair) -> None:
    length = 40 * PROMPT_LOGPROBS_A_MESSAGE
    request = PrefillRequest(token_ids=[1] * length, prompt_logprobs=True)
    events = pair.client.stream(EngineCommand(prefill=request))
    first: asyncio.Future[EngineEvent] = asyncio.ensure_future(anext(events))
    command = await pair.command()
    for position in range(1, length, PROMPT_LOGPROBS_A_MESSAGE):
        reported = PrefillResponse(prompt_logprobs=PromptLogprobs(first_position=position))
        pair.engine.send(EngineEvent(id=command.id, prefill=reported))
    pair.engine.send(EngineEvent(id=command.id, prefill_ended=PrefillEndedEvent()))
    await first
    await asyncio.sleep(0.05)  # this one is not read: events of others must still be dispatched
    call = asyncio.create_task(pair.client.call(reserve()))
    pair.engine.send(EngineEvent(id=(await pair.command()).id, reserved=ReservedEvent(slot=3)))
    assert (await asyncio.wait_for(call, 5)).reserved.slot == 3
    assert len([event async for event in events]) == 39


async def test_a_dead_engine_fails_pending_and_later_calls(pair: Pair) -> None:
    call = asyncio.create_task(pair.client.call(reserve()))
    events = pair.client.stream(EngineCommand(prefill=PrefillRequest()))
    stream: asyncio.Future[EngineEvent] = asyncio.ensure_future(anext(events))
    await pair.command()
    await pair.command()
    pair.sock.close()
    for waiting in (call, stream):
        with pytest.raises(BatonError) as dead:
            await waiting
        assert dead.value.kind is ErrorKind.UNAVAILABLE
    assert isinstance(await pair.run, ChannelClosedError)
    with pytest.raises(ChannelClosedError):
        await pair.client.call(reserve())


async def test_the_engines_last_event_is_the_reason_of_its_end(pair: Pair) -> None:
    failed = FailedEvent(kind=ErrorKind.INVALID.value, message="no such file")  # type: ignore[arg-type]
    pair.engine.send(EngineEvent(failed=failed))
    assert (await pair.run).message == "no such file"
