"""Spans of a Prefill call: what its engine reported of it, how it ended, whether it is traced at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc.aio
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.engine_pb2 import EngineCommand, EngineEvent, PrefillEndedEvent
from baton.v1.prefill_pb2 import FirstToken, HandedOff, PrefillRequest, PrefillResponse
from baton.v1.types_pb2 import Attempt, TraceParent
from services.common.engine.client import EngineClient
from services.common.processes.drain import Drain
from services.prefill.servicer import PrefillServicer
from tests.support.kept_spans import KeptSpans

TRACE, PARENT = b"t" * 16, b"p" * 8
NAME = "baton.worker.prefill"


class Engine:
    """Answers a prefill with a first token, a handoff over `transport`, and an end; or fails, or hangs."""

    def __init__(
        self, transport: str = "ipc", error: BatonError | None = None, *, hangs: bool = False
    ) -> None:
        self.transport, self.error, self.hangs = transport, error, hangs
        self.commands: list[EngineCommand] = []

    async def stream(
        self, command: EngineCommand, on_end: Callable[[PrefillEndedEvent], None] | None
    ) -> AsyncIterator[EngineEvent]:
        self.commands.append(command)
        began = time.monotonic_ns()
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        yield EngineEvent(prefill=PrefillResponse(first_token=FirstToken(cached_tokens=2)))
        handed_off = HandedOff(transport=self.transport, bytes_shipped=64, exposed_ns=500_000_000)
        yield EngineEvent(prefill=PrefillResponse(handed_off=handed_off))
        if on_end is not None:
            on_end(PrefillEndedEvent(started_ns=began + 1, computed_ns=began + 4, shipped_ns=began + 2))

    async def send(self, command: EngineCommand) -> None:
        self.commands.append(command)


class Context:
    async def write(self, _: object) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, *_: object, **__: object) -> None:
        raise RuntimeError(code)


def servicer(engine: Engine, kept: KeptSpans | None) -> PrefillServicer:
    spans = None if kept is None else kept.recorder
    return PrefillServicer(cast("EngineClient", engine), Drain(), spans=spans)


def request(**trace: Any) -> PrefillRequest:
    trace = {"trace_id": TRACE, "span_id": PARENT, "state": "a=1", **trace}
    attempt = Attempt(request_id=b"r" * 16, number=2)
    return PrefillRequest(attempt=attempt, token_ids=[11, 12, 13], trace=TraceParent(**trace))


async def test_the_stages_of_a_call() -> None:
    engine, kept = Engine(), KeptSpans()
    await servicer(engine, kept).Prefill(request(), cast("Any", Context()))
    assert not engine.commands[0].prefill.HasField("trace")
    named = kept.named()
    assert set(named) == {NAME, *(f"{NAME}.{stage}" for stage in ("queue", "compute", "transfer"))}
    call = named.pop(NAME)
    assert (call.context.trace_id, call.parent_id, call.context.state) == (TRACE, PARENT, "a=1")
    assert (call.kind, call.error) == ("server", "")
    assert call.attributes == {
        "baton.request_id": (b"r" * 16).hex(),
        "baton.attempt": 2,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
    }
    (first,) = call.events
    assert call.start_ns <= first.at_ns <= call.end_ns
    assert {span.parent_id for span in named.values()} == {call.context.span_id}
    queue, compute = named[f"{NAME}.queue"], named[f"{NAME}.compute"]
    transfer = named[f"{NAME}.transfer"]
    assert call.start_ns == queue.start_ns <= queue.end_ns == compute.start_ns == compute.end_ns - 3
    assert transfer.start_ns == compute.start_ns + 1
    assert transfer.end_ns == call.end_ns
    assert transfer.attributes == {
        "baton.transport": "ipc",
        "baton.kv_bytes_shipped": 64,
        "baton.exposed_s": 0.5,
    }


async def test_a_handoff_within_a_worker_has_no_transfer() -> None:
    kept = KeptSpans()
    await servicer(Engine("local"), kept).Prefill(request(), cast("Any", Context()))
    assert set(kept.named()) == {NAME, f"{NAME}.queue", f"{NAME}.compute"}


async def test_a_call_that_fails_has_the_error() -> None:
    kept = KeptSpans()
    engine = Engine(error=BatonError(ErrorKind.OVERLOADED, "full"))
    with pytest.raises(RuntimeError):
        await servicer(engine, kept).Prefill(request(), cast("Any", Context()))
    (span,) = kept.all()
    assert (span.name, span.error) == (NAME, "overloaded")


async def test_a_call_that_is_cancelled_says_so() -> None:
    kept, engine = KeptSpans(), Engine(hangs=True)
    call = asyncio.create_task(servicer(engine, kept).Prefill(request(), cast("Any", Context())))
    while not engine.commands:  # noqa: ASYNC110
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    (span,) = kept.all()
    assert (span.name, span.error) == (NAME, "cancelled")


async def test_what_is_not_traced_leaves_nothing() -> None:
    kept = KeptSpans()
    plain = request()
    plain.ClearField("trace")
    for given in (plain, request(trace_id=b"short"), request(span_id=b"")):
        await servicer(Engine(), kept).Prefill(given, cast("Any", Context()))
    assert kept.all() == []
    await servicer(Engine(), None).Prefill(request(), cast("Any", Context()))
