"""The DecodeService of a worker: reservations go to the engine, tokens come from the output ring."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from baton.base.errors import BatonError, ErrorKind
from baton.device.wakeup import Wakeup
from baton.engine.shared_memory.output_ring import Finish, Record, RingReader
from baton.engine.shared_memory.slot_progress import SlotProgress
from baton.model_spec.block_hash import HASH_BYTES, MAX_RESERVE_HASHES
from baton.v1 import decode_pb2
from baton.v1.decode_pb2_grpc import DecodeServiceServicer
from baton.v1.engine_pb2 import (
    CanaryCommand,
    CancelCommand,
    EngineCommand,
    EngineEvent,
    ReservedEvent,
    SlotEndedCommand,
)
from baton.v1.types_pb2 import Attempt, Failure, Grammar, WorkerRole
from services.common.engine.client import EngineClient
from services.common.errors import abort, logged_reason
from services.common.observability.histogram import Histogram
from services.common.observability.logs import get_log
from services.common.observability.tracing.recorder import SpanRecorder
from services.common.processes.drain import Drain
from services.decode.canary import CanaryOutput
from services.decode.output_streams import OutputStreams, UnknownSequenceError
from services.decode.slot_span import SlotSpan
from services.grammar.client import MaskClient
from services.grammar.strip import without_grammar

Context = grpc.aio.ServicerContext[Any, Any]

ID_BYTES = 16
_SWEEP_S = 0.2

log = get_log(__name__)


@dataclass(eq=False)
class DecodeServicer(DecodeServiceServicer):
    """Owns the output streams; `run` reads the output ring for the lifetime of the worker.

    `progress`: read at the end of each sequence, before the engine reuses its slot. `stepped`: set by the
    engine when there may be something in the ring. `reports_output`: whether the engine receives the output
    of each sequence at its end, for its prefix cache. `masks`: computes those of guided sequences; None:
    there are none. `spans`: where slots are traced. `speculates`: whether steps may have drafts."""

    incarnation: bytes
    engine: EngineClient
    ring: RingReader
    progress: SlotProgress
    stepped: Wakeup
    drain: Drain
    reports_output: bool
    masks: MaskClient | None = None
    spans: SpanRecorder | None = None
    speculates: bool = False
    # The ring is read when the engine has set `stepped`, and this often where it did not: a GPU writes the
    # ring while the engine's loop may be occupied. No more often, however short steps are.
    poll_s: float = 0.001
    # Heartbeat interval of a router's stream without output; distinguishes an idle worker from a hung one.
    heartbeat_s: float = 0.5
    streams: OutputStreams = field(init=False)
    # Delay of each poll of the ring, in seconds.
    poll_lag: Histogram = field(default_factory=Histogram, init=False)
    # Sequences of requests that have ended by themselves.
    sequences_finished: int = field(default=0, init=False)
    # Sequences in the ring that no reservation or canary generation was registered for.
    unknown_sequences: int = field(default=0, init=False)
    # Those of them that have not ended: at most one a slot.
    _unknown: set[tuple[int, int]] = field(default_factory=set, init=False)
    # The canary generation whose output has not ended.
    _canary: CanaryOutput | None = field(default=None, init=False)
    # Set while there is something to poll for.
    _reserved: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # Set when `stepped` was, and when it has been waited for long enough.
    _due: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # By router id, of open streams.
    _news: dict[bytes, asyncio.Event] = field(default_factory=dict, init=False)
    _ended: bool = field(default=False, init=False)
    # Attempts whose masks failed, to be cancelled.
    _cancels: list[Attempt] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.streams = OutputStreams(progress=self.progress.progress)

    @property
    def live(self) -> int:
        """The number of reservations and sequences that have not ended."""
        return self.streams.live

    @property
    def outputs_dropped(self) -> int:
        """Number of ended outputs that were dropped, to bound memory, before their routers had taken them."""
        return self.streams.dropped_unsent

    async def run(self) -> None:
        """Moves records from the ring to the streams and wakes the routers, one message a poll; runs until
        cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.stepped.fileno(), self._on_stepped)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._poll())
                tasks.create_task(self._sweep())
        finally:
            loop.remove_reader(self.stepped.fileno())

    def on_event(self, event: EngineEvent) -> None:
        """Handles an event of the engine that answers no command."""
        if event.WhichOneof("event") == "ticket_ended":
            ended = event.ticket_ended
            self.streams.end_unused(ended.attempt)
            if self.masks is not None:
                self.masks.close((ended.slot, ended.generation))
            self._wake()

    def on_mask_failed(self, slot: int, generation: int, error: BatonError) -> None:
        """Ends a guided sequence whose next mask cannot be computed, and sends the reason to its router."""
        failure = Failure(kind=error.kind.value, message=error.message)  # type: ignore[arg-type]
        attempt = self.streams.fail(slot, generation, failure)
        if attempt is not None:
            log.warning("guided_sequence_failed", kind=error.kind.name, reason=logged_reason(error))
            self._cancels.append(attempt)

    async def run_canary(self) -> None:
        """Decodes a canary generation, apart from all streams. Raises BatonError where the engine refuses
        it, or it does not end as it should; `CanaryCommand.cancel` ends one that takes too long."""
        side = WorkerRole.WORKER_ROLE_DECODE
        granted = await self.engine.call(EngineCommand(canary=CanaryCommand(side=side)))
        output = self._canary = CanaryOutput.of(granted.canary)
        self._reserved.set()
        # Only now: what is read from the ring must be known before.
        await self.engine.send(EngineCommand(canary=CanaryCommand(side=side, admit=True)))
        await output.check()

    def end(self) -> None:
        """Ends the routers' streams once they have received all output: this start of the worker has
        ended."""
        self._ended = True
        self._wake()

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        try:
            self.drain.check()
            _check_ids(request)
            command = EngineCommand(reserve=request)
            command.reserve.ClearField("trace")  # the engine has no use for it
            source = await self._source(request.tenant, without_grammar(command.reserve))
            event = await self.engine.call(command, on_answer=partial(self._register, request))
            if source is not None:
                await self._guide(request, source, event.reserved)
            return decode_pb2.ReserveResponse(ticket=event.reserved.ticket, kv_bytes=event.reserved.kv_bytes)
        except BatonError as error:
            await abort(context, error)

    async def _source(self, tenant: str, grammar: Grammar | None) -> str | None:
        """A grammar that was compiled, before a slot waits for it. Raises BatonError where there are no masks
        of it."""
        if grammar is None:
            return None
        if self.masks is None:
            raise BatonError(ErrorKind.CONFLICT, "this worker computes no grammar masks")
        return await self.masks.source(tenant, grammar)

    async def _guide(self, request: decode_pb2.ReserveRequest, source: str, reserved: ReservedEvent) -> None:
        """Has the masks of a reserved slot computed. Raises what makes that impossible; the reservation then
        ends."""
        assert self.masks is not None
        try:
            key = reserved.slot, reserved.generation
            await self.masks.follow(key, request.token_count, source, request.limits, request.output_ids)
        except BaseException:
            await self.engine.send(EngineCommand(cancel=CancelCommand(attempt=request.attempt)))
            raise

    def _register(self, request: decode_pb2.ReserveRequest, event: EngineEvent) -> None:
        reserved = event.reserved
        self.streams.reserve(
            request.attempt,
            request.router_id,
            request.first_number,
            reserved.slot,
            reserved.generation,
            SlotSpan.of(self.spans, request),
            always_counted=self.speculates
            and (request.counts_in_every_message or bool(request.prediction_token_ids)),
        )
        self._reserved.set()

    async def Subscribe(self, request: decode_pb2.SubscribeRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Streams output to a router. Writes instead of yielding: a cancellation during a write is then
        raised here, and not in grpc's wrapper around a suspended generator."""
        router_id = request.router_id
        if len(router_id) != ID_BYTES:
            await abort(context, BatonError(ErrorKind.INVALID, f"router_id must have {ID_BYTES} bytes"))
        if request.incarnation != self.incarnation:
            await abort(context, BatonError(ErrorKind.CONFLICT, "the request is for another incarnation"))
        connection, unknown = self.streams.follow(router_id, request.positions, request.former_router_ids)
        news = self._news[router_id] = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            # At once: the router learns that its stream is open.
            await context.write(decode_pb2.SubscribeResponse(step=self.ring.steps, unknown=unknown))
            heartbeat_at = loop.time() + self.heartbeat_s
            while self.streams.is_current(router_id, connection):
                message = self.streams.collect(router_id, self.ring.steps)
                if message is None:
                    if self._ended:  # otherwise the router would try to reopen the stream
                        over = BatonError(ErrorKind.CONFLICT, "this start of the worker has ended")
                        await abort(context, over)
                    news.clear()
                    try:
                        # Output for other routers sets `news`, too: it must not defer the heartbeat.
                        async with asyncio.timeout_at(heartbeat_at):
                            await news.wait()
                        continue
                    except TimeoutError:
                        message = decode_pb2.SubscribeResponse(step=self.ring.steps)
                await context.write(message)
                heartbeat_at = loop.time() + self.heartbeat_s
        finally:
            self.streams.unfollow(router_id, connection)
            if self._news.get(router_id) is news:
                del self._news[router_id]

    async def Attach(self, request: decode_pb2.AttachRequest, context: Context) -> decode_pb2.AttachResponse:  # noqa: N802
        try:
            self.streams.attach(request.attempt, request.router_id, request.next_number)
        except BatonError as error:
            await abort(context, error)
        self._wake()
        return decode_pb2.AttachResponse()

    async def Cancel(self, request: decode_pb2.CancelRequest, context: Context) -> decode_pb2.CancelResponse:  # noqa: N802
        try:
            await self.engine.call(EngineCommand(cancel=CancelCommand(attempt=request.attempt)))
        except BatonError as error:
            await abort(context, error)
        return decode_pb2.CancelResponse()

    async def GetHandoff(  # noqa: N802
        self, request: decode_pb2.GetHandoffRequest, context: Context
    ) -> decode_pb2.GetHandoffResponse:
        try:
            return (await self.engine.call(EngineCommand(handoff_state=request))).handoff_state
        except BatonError as error:
            await abort(context, error)

    async def _poll(self) -> None:
        while True:
            if not (self.streams.live or self._canary):
                self._reserved.clear()
                await self._reserved.wait()
            self._due.clear()
            came = await self.read_ring()
            due = time.monotonic() + self.poll_s
            if came:
                self._wake()
                await asyncio.sleep(self.poll_s)
            else:
                await self._next_step()
            self.poll_lag.observe(max(0.0, time.monotonic() - due))

    async def read_ring(self) -> bool:
        """Moves what is in the ring to the streams; False where there was nothing."""
        records = self.ring.read()
        for record in records:
            if (output := self._take(record)) is not None:
                ended = SlotEndedCommand(slot=record.slot, generation=record.generation, token_ids=output)
                await self.engine.send(EngineCommand(slot_ended=ended))
        return bool(records)

    async def _next_step(self) -> None:
        """Waits until the engine has ended a step since the ring was read, at most `poll_s`."""
        timer = asyncio.get_running_loop().call_later(self.poll_s, self._due.set)
        try:
            await self._due.wait()
        finally:
            timer.cancel()

    def _on_stepped(self) -> None:
        self.stepped.clear()
        self._due.set()

    def _take(self, record: Record) -> Sequence[int] | None:
        """Adds a record of the ring to its stream. None unless it is the last one, else the output's token
        ids for the engine's prefix cache; empty where it needs none."""
        if self._canary is not None and self._canary.owns(record):
            if not self._canary.take(record):
                return None
            self._canary = None
            return ()
        try:
            output = self.streams.emit(record)
        except UnknownSequenceError:
            return self._drop_unknown(record)
        if output is None:
            return None
        if self.masks is not None:
            self.masks.ended((record.slot, record.generation))
        self.sequences_finished += record.finish in (Finish.STOP, Finish.LENGTH)
        return output if self.reports_output else ()

    def _drop_unknown(self, record: Record) -> Sequence[int] | None:
        """Drops a record of a sequence that was never registered here, which no call waits for. It ends as
        any other, so that the engine frees its slot."""
        key = record.slot, record.generation
        if key not in self._unknown:
            self._unknown.add(key)
            self.unknown_sequences += 1
            log.error("unknown_sequence_dropped", slot=record.slot, generation=record.generation)
        if record.finish is Finish.NONE:
            return None
        self._unknown.discard(key)
        return ()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            dropped = self.streams.dropped_unsent
            orphans = self.streams.sweep()
            if self.streams.dropped_unsent > dropped:
                log.warning("unsent_output_dropped", outputs=self.streams.dropped_unsent - dropped)
                self._wake()  # their routers are to be told
            for attempt in (*orphans, *self._take_cancels()):
                await self.engine.send(EngineCommand(cancel=CancelCommand(attempt=attempt)))

    def _take_cancels(self) -> list[Attempt]:
        """Attempts that this worker gave up since the last call."""
        taken, self._cancels = self._cancels, []
        return taken

    def _wake(self) -> None:
        for news in self._news.values():
            news.set()


def _check_ids(request: decode_pb2.ReserveRequest) -> None:
    if len(request.attempt.request_id) != ID_BYTES or len(request.router_id) != ID_BYTES:
        raise BatonError(ErrorKind.INVALID, f"request_id and router_id must have {ID_BYTES} bytes")
    names = request.block_hashes
    if len(names) > MAX_RESERVE_HASHES or any(len(name) != HASH_BYTES for name in names):
        raise BatonError(
            ErrorKind.INVALID, f"block_hashes are at most {MAX_RESERVE_HASHES} of {HASH_BYTES} bytes"
        )
