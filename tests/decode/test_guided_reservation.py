"""A reservation whose output is guided: nothing is reserved for a grammar that cannot be used, and nothing
stays reserved for one whose masks fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.shared_memory.layout import SharedRings
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.engine_pb2 import EngineCommand, EngineEvent, ReservedEvent
from baton.v1.types_pb2 import Attempt, Grammar
from services.common.engine.client import EngineClient
from services.common.processes.drain import Drain
from services.decode.servicer import DecodeServicer
from services.grammar.client import MaskClient

REQUEST = ReserveRequest(
    attempt=Attempt(request_id=b"q" * 16, number=1),
    router_id=b"r" * 16,
    tenant="alice",
    grammar=Grammar(regex="a"),
)


class Engine:
    """Reserves, and notes its commands."""

    def __init__(self) -> None:
        self.commands: list[str | None] = []

    async def call(self, command: EngineCommand, on_answer: Callable[[EngineEvent], None]) -> EngineEvent:
        self.commands.append(command.WhichOneof("command"))
        event = EngineEvent(reserved=ReservedEvent(slot=1, generation=7))
        on_answer(event)
        return event

    async def send(self, command: EngineCommand) -> None:
        self.commands.append(command.WhichOneof("command"))


class Masks:
    """Fails as it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.compiling: BaseException | None = None
        self.following: BaseException | None = None

    async def source(self, tenant: str, grammar: Grammar) -> str:
        self.asked.append(tenant)
        if self.compiling is not None:
            raise self.compiling
        return grammar.regex

    async def follow(self, *_: object) -> None:
        if self.following is not None:
            raise self.following


class AbortedError(Exception):
    pass


class Context:
    async def abort(self, code: grpc.StatusCode, *_: object, **__: object) -> None:
        raise AbortedError(code)


class Worker:
    """A decode servicer over fakes."""

    def __init__(self) -> None:
        self.engine, self.masks, self.stepped = Engine(), Masks(), Wakeup()
        rings = SharedRings(2)
        memory = SharedMemory.create("test-ring", rings.size)
        reader, progress = rings.reader(memory), rings.progress(memory)
        engine, masks = cast(EngineClient, self.engine), cast(MaskClient, self.masks)
        self.servicer = DecodeServicer(
            b"i" * 16, engine, reader, progress, self.stepped, Drain(), False, masks
        )

    async def reserve(self) -> object:
        return await self.servicer.Reserve(REQUEST, cast(Any, Context()))


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.stepped.close()


async def test_a_grammar_is_compiled_for_its_tenant_before_a_slot_is_reserved(worker: Worker) -> None:
    await worker.reserve()
    assert (worker.masks.asked, worker.engine.commands) == (["alice"], ["reserve"])
    worker.masks.compiling = BatonError(ErrorKind.INVALID, "it cannot be used")
    with pytest.raises(AbortedError, match="INVALID_ARGUMENT"):
        await worker.reserve()
    assert worker.engine.commands == ["reserve"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (BatonError(ErrorKind.CONFLICT, "the mask process ended"), AbortedError),
        (OSError(24, "no descriptor is left"), OSError),
        (RuntimeError("the handler is closed"), RuntimeError),
        (asyncio.CancelledError(), asyncio.CancelledError),
    ],
)
async def test_whatever_fails_the_reservation_ends(
    worker: Worker, error: BaseException, raised: type[BaseException]
) -> None:
    worker.masks.following = error
    with pytest.raises(raised):
        await worker.reserve()
    assert worker.engine.commands == ["reserve", "cancel"]
