"""Prefill's gRPC face: a ticket finds its prompt, whichever of the two calls comes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc.aio
import pytest

from baton.v1.decode_pb2 import Ticket
from baton.v1.engine_pb2 import EngineCommand, EngineEvent
from baton.v1.prefill_pb2 import GiveTicketRequest, PrefillRequest
from baton.v1.types_pb2 import Attempt
from services.common.drain import Drain
from services.common.engine_client import EngineClient
from services.prefill import servicer
from services.prefill.servicer import PrefillServicer

ATTEMPT = Attempt(request_id=b"a" * 16, number=1)
GIVEN = GiveTicketRequest(attempt=ATTEMPT, ticket=Ticket(body=b"promise"))


class FakeEngine:
    """Notes commands; a prefill runs until `done`."""

    def __init__(self) -> None:
        self.commands: list[EngineCommand] = []
        self.done = asyncio.Event()

    async def stream(self, command: EngineCommand) -> AsyncIterator[EngineEvent]:
        self.commands.append(command)
        await self.done.wait()
        yield EngineEvent()

    async def call(self, command: EngineCommand) -> EngineEvent:
        self.commands.append(command)
        return EngineEvent()


class AbortedError(Exception):
    pass


class Context:
    async def write(self, _: object) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, *_: object, **__: object) -> None:
        raise AbortedError(code)


def made() -> tuple[PrefillServicer, FakeEngine, Any]:
    engine = FakeEngine()
    return PrefillServicer(cast("EngineClient", engine), Drain()), engine, Context()


def prompt() -> PrefillRequest:
    return PrefillRequest(attempt=ATTEMPT, token_ids=[1, 2], ticket_follows=True)


async def test_a_ticket_behind_its_prompt_goes_to_the_engine() -> None:
    prefill, engine, context = made()
    call = asyncio.create_task(prefill.Prefill(prompt(), context))
    await asyncio.sleep(0)
    await prefill.GiveTicket(GIVEN, context)
    first, second = engine.commands
    assert first.prefill.request.ticket_follows
    assert second.give_ticket.request == GIVEN
    engine.done.set()
    await call


async def test_a_ticket_ahead_of_its_prompt_goes_with_it() -> None:
    prefill, engine, context = made()
    await prefill.GiveTicket(GIVEN, context)
    assert not engine.commands
    engine.done.set()
    await prefill.Prefill(prompt(), context)
    (command,) = engine.commands
    assert command.prefill.request.ticket == GIVEN.ticket
    assert not command.prefill.request.ticket_follows


async def test_a_ticket_ahead_of_nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "_AHEAD_S", 0.01)
    prefill, engine, context = made()
    await prefill.GiveTicket(GIVEN, context)
    await asyncio.sleep(0.05)
    engine.done.set()
    await prefill.Prefill(prompt(), context)
    assert engine.commands[0].prefill.request.ticket_follows


async def test_one_call_an_attempt() -> None:
    prefill, engine, context = made()
    call = asyncio.create_task(prefill.Prefill(prompt(), context))
    await asyncio.sleep(0)
    with pytest.raises(AbortedError):
        await prefill.Prefill(prompt(), context)
    await prefill.GiveTicket(GIVEN, context)  # the first call's, as before
    assert [command.WhichOneof("command") for command in engine.commands] == ["prefill", "give_ticket"]
    engine.done.set()
    await call
