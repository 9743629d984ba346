"""The PrefillService: a ticket reaches its prompt, whichever of the two calls arrives first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc.aio
import pytest

from baton.v1.decode_pb2 import Ticket
from baton.v1.engine_pb2 import EngineCommand, EngineEvent
from baton.v1.prefill_pb2 import FirstToken, PrefillRequest, PrefillResponse, ProvideTicketRequest
from baton.v1.types_pb2 import Attempt
from services.common.engine.attempt_key import AttemptKey
from services.common.engine.client import EngineClient
from services.common.processes.drain import Drain
from services.grammar.client import MaskClient
from services.prefill import early_tickets, servicer
from services.prefill.early_tickets import EarlyTickets
from services.prefill.servicer import PrefillServicer

ATTEMPT = Attempt(request_id=b"a" * 16, number=1)
GIVEN = ProvideTicketRequest(attempt=ATTEMPT, ticket=Ticket(body=b"promise"))


class FakeEngine:
    """Notes commands; a prefill runs until `done`."""

    def __init__(self) -> None:
        self.commands: list[EngineCommand] = []
        self.done = asyncio.Event()

    async def stream(self, command: EngineCommand, _: object = None) -> AsyncIterator[EngineEvent]:
        self.commands.append(command)
        await self.done.wait()
        yield EngineEvent()

    async def send(self, command: EngineCommand) -> None:
        self.commands.append(command)

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


async def test_a_ticket_after_its_prompt_is_sent_to_the_engine() -> None:
    prefill, engine, context = made()
    call = asyncio.create_task(prefill.Prefill(prompt(), context))
    await asyncio.sleep(0)
    await prefill.ProvideTicket(GIVEN, context)
    first, second = engine.commands
    assert first.prefill.ticket_follows
    assert second.provide_ticket == GIVEN
    engine.done.set()
    await call


async def test_a_ticket_before_its_prompt_is_sent_with_it() -> None:
    prefill, engine, context = made()
    await prefill.ProvideTicket(GIVEN, context)
    assert not engine.commands
    engine.done.set()
    await prefill.Prefill(prompt(), context)
    (command,) = engine.commands
    assert command.prefill.ticket == GIVEN.ticket
    assert not command.prefill.ticket_follows


async def test_a_ticket_without_a_prompt_expires() -> None:
    prefill, engine, context = made()
    prefill.early = EarlyTickets(0.01)
    await prefill.ProvideTicket(GIVEN, context)
    await asyncio.sleep(0.05)
    engine.done.set()
    await prefill.Prefill(prompt(), context)
    assert engine.commands[0].prefill.ticket_follows


class DrawingEngine(FakeEngine):
    """Draws the first token at once; the rest takes until `done`."""

    async def stream(self, command: EngineCommand, _: object = None) -> AsyncIterator[EngineEvent]:
        self.commands.append(command)
        yield EngineEvent(prefill=PrefillResponse(first_token=FirstToken(token_id=5)))
        await self.done.wait()


@pytest.mark.parametrize("guided", [False, True], ids=["free", "guided"])
@pytest.mark.parametrize("comes", [False, True], ids=["never", "comes"])
async def test_a_prompt_does_not_wait_for_ever_for_its_ticket(
    monkeypatch: pytest.MonkeyPatch, comes: bool, guided: bool
) -> None:
    monkeypatch.setattr(servicer, "GUIDED_TICKET_S" if guided else "TICKET_S", 0.02)
    engine, context, masks = DrawingEngine(), cast("Any", Context()), SlowMasks()
    masks.done.set()
    prefill = PrefillServicer(cast("EngineClient", engine), Drain(), cast("MaskClient", masks))
    request = prompt()
    if guided:
        request.grammar.regex = "a+"
    call = asyncio.create_task(prefill.Prefill(request, context))
    await asyncio.sleep(0)
    if comes:
        await prefill.ProvideTicket(GIVEN, context)
        await asyncio.sleep(0.1)
        engine.done.set()
        await call
        return
    async with asyncio.timeout(5):
        with pytest.raises(AbortedError) as aborted:
            await call
    assert aborted.value.args == (grpc.StatusCode.FAILED_PRECONDITION,), "another attempt follows"
    assert engine.commands[-1].cancel.attempt == ATTEMPT, "its blocks are freed"


class SlowMasks:
    """Masks of first tokens that come once they are `done`."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    async def source(self, *_: object) -> str:
        await self.done.wait()
        return "a grammar"

    async def next_mask(self, *_: object) -> bytes:
        return b"mask"


@pytest.mark.parametrize("first", ["prompt", "ticket"])
async def test_a_ticket_is_kept_while_its_prompt_waits_for_a_grammar(first: str) -> None:
    """Processes that compile grammars may take seconds to start; a prompt whose ticket is dropped meanwhile
    would wait for it until its deadline."""
    engine, context, masks = FakeEngine(), cast("Any", Context()), SlowMasks()
    prefill = PrefillServicer(cast("EngineClient", engine), Drain(), cast("MaskClient", masks))
    prefill.early = EarlyTickets(0.01)
    if first == "ticket":
        await prefill.ProvideTicket(GIVEN, context)
    guided = prompt()
    guided.grammar.regex = "a+"
    call = asyncio.create_task(prefill.Prefill(guided, context))
    await asyncio.sleep(0)
    if first == "prompt":
        await prefill.ProvideTicket(GIVEN, context)
    await asyncio.sleep(0.05)
    second = PrefillRequest()
    second.CopyFrom(guided)
    with pytest.raises(AbortedError):
        await prefill.Prefill(second, context)
    masks.done.set()
    engine.done.set()
    await call
    (command,) = engine.commands
    assert command.prefill.ticket == GIVEN.ticket
    assert not command.prefill.ticket_follows
    assert command.first_token_mask == b"mask"


async def test_a_ticket_goes_with_the_call_that_waited_for_a_grammar() -> None:
    engine, context, masks = FakeEngine(), cast("Any", Context()), SlowMasks()
    prefill = PrefillServicer(cast("EngineClient", engine), Drain(), cast("MaskClient", masks))
    guided = prompt()
    guided.grammar.regex = "a+"
    call = asyncio.create_task(prefill.Prefill(guided, context))
    await asyncio.sleep(0)
    await prefill.ProvideTicket(GIVEN, context)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    engine.done.set()
    await prefill.Prefill(prompt(), context)
    assert engine.commands[-1].prefill.ticket_follows


@pytest.mark.parametrize("first", ["prompt", "ticket"])
async def test_tickets_of_prompts_that_wait_for_a_grammar_are_bounded(first: str) -> None:
    engine, context, masks = FakeEngine(), cast("Any", Context()), SlowMasks()
    prefill = PrefillServicer(cast("EngineClient", engine), Drain(), cast("MaskClient", masks))
    large, calls, codes = early_tickets.MAX_TICKET_BYTES, [], set()
    for number in range(600):
        guided = PrefillRequest(attempt=Attempt(request_id=b"r" * 16, number=number), ticket_follows=True)
        guided.grammar.regex = "a+"
        if first == "ticket":
            await prefill.ProvideTicket(given(number, large - 100), context)
        calls.append(asyncio.create_task(prefill.Prefill(guided, context)))
        await asyncio.sleep(0)
        if first == "prompt":
            codes.add(await refusal(prefill, given(number, large - 100), context))
    if first == "prompt":
        assert await refusal(prefill, given(0, large), context) is grpc.StatusCode.INVALID_ARGUMENT
        assert codes == {None, grpc.StatusCode.RESOURCE_EXHAUSTED}
    else:
        ended = {call.exception().args[0] for call in calls if call.done()}  # type: ignore[union-attr]
        assert ended == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert early_tickets.MAX_BYTES - large < prefill.held.bytes <= early_tickets.MAX_BYTES
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (len(prefill.held), prefill.held.bytes) == (0, 0)


def given(number: int, size: int = 100, request_id: bytes = b"r" * 16) -> ProvideTicketRequest:
    attempt = Attempt(request_id=request_id, number=number)
    return ProvideTicketRequest(attempt=attempt, ticket=Ticket(body=bytes(size)))


async def refusal(
    prefill: PrefillServicer, request: ProvideTicketRequest, context: Any
) -> grpc.StatusCode | None:
    try:
        await prefill.ProvideTicket(request, context)
    except AbortedError as error:
        return cast("grpc.StatusCode", error.args[0])
    return None


async def test_tickets_of_unknown_attempts_are_bounded_in_size_and_number() -> None:
    prefill, _, context = made()
    large = early_tickets.MAX_TICKET_BYTES
    for request in (given(1, 30_000_000), given(1, large), given(1, request_id=bytes(large))):
        assert await refusal(prefill, request, context) is grpc.StatusCode.INVALID_ARGUMENT
    early = prefill.early
    assert (len(early), early.bytes) == (0, 0)
    codes = {await refusal(prefill, given(number, large - 100), context) for number in range(600)}
    assert codes == {None, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert early.bytes <= early_tickets.MAX_BYTES
    prefill, _, context = made()
    for number in range(early_tickets.MAX_TICKETS):
        assert await refusal(prefill, given(number), context) is None
    assert await refusal(prefill, given(-1 % (1 << 32)), context) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await refusal(prefill, given(0), context) is None, "a repeated call takes no more room"


def test_early_tickets_free_their_space() -> None:
    now = [0.0]
    early = EarlyTickets(clock=lambda: now[0])
    for number in range(3):
        early.add(AttemptKey(b"r" * 16, number), Ticket(body=bytes(100)))
    assert early.take(AttemptKey(b"r" * 16, 1)) == Ticket(body=bytes(100))
    assert early.take(AttemptKey(b"r" * 16, 1)) is None
    now[0] = early_tickets.LIFETIME_S - 0.1
    early.add(AttemptKey(b"r" * 16, 0), Ticket(body=b"newer"))
    now[0] += 0.2
    assert early.take(AttemptKey(b"r" * 16, 2)) is None
    assert early.take(AttemptKey(b"r" * 16, 0)) == Ticket(body=b"newer")
    assert (len(early), early.bytes) == (0, 0)


async def test_a_second_call_of_an_attempt_is_refused() -> None:
    prefill, engine, context = made()
    call = asyncio.create_task(prefill.Prefill(prompt(), context))
    await asyncio.sleep(0)
    with pytest.raises(AbortedError):
        await prefill.Prefill(prompt(), context)
    await prefill.ProvideTicket(GIVEN, context)  # the first call's, as before
    assert [command.WhichOneof("command") for command in engine.commands] == ["prefill", "provide_ticket"]
    engine.done.set()
    await call
