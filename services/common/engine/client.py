"""The front's calls to the engine process, as coroutines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.v1.engine_pb2 import EngineCommand, EngineEvent, PrefillEndedEvent
from baton.v1.prefill_pb2 import PrefillRequest
from services.common.engine.channel import (
    PROMPT_LOGPROBS_A_MESSAGE,
    ChannelClosedError,
    FrontEnd,
    failed_event,
)

# First token, handoff, end; logprobs of the prompt come on top.
_EVENTS_A_PREFILL = 8
_CALL_TIMEOUT_S = 10.0
_MAX_CALLS = 4096


@dataclass(frozen=True, slots=True)
class _Call:
    """A command that waits for its answer, even where its caller was cancelled."""

    future: asyncio.Future[EngineEvent]
    on_answer: Callable[[EngineEvent], None] | None

    def answer(self, event: EngineEvent) -> None:
        if self.on_answer is not None and event.WhichOneof("event") != "failed":
            self.on_answer(event)
        if not self.future.done():
            self.future.set_result(event)


class EngineClient:
    """Matches events to the commands they answer. `run` reads until the engine is gone."""

    def __init__(self, channel: FrontEnd) -> None:
        self._channel = channel
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._streams: dict[int, asyncio.Queue[EngineEvent]] = {}
        self._closed: BatonError | None = None
        # Prefills that have ended without an error.
        self.prefills_finished = 0

    @property
    def prefills(self) -> int:
        """Number of prefills that run."""
        return len(self._streams)

    async def run(self, on_event: Callable[[EngineEvent], None]) -> BatonError:
        """Dispatches events until the engine ends or fails; returns why. All calls then fail with it.

        `on_event` is called for each event that answers no command.
        """
        try:
            while True:
                event = await self._channel.receive()
                if event.id == 0 and event.WhichOneof("event") == "failed":
                    self._closed = _error(event)
                    return self._closed
                self._dispatch(event, on_event)
        except ChannelClosedError as error:
            self._closed = error
            return error
        finally:
            self._fail_all()

    async def call(
        self,
        command: EngineCommand,
        timeout_s: float = _CALL_TIMEOUT_S,
        on_answer: Callable[[EngineEvent], None] | None = None,
    ) -> EngineEvent:
        """Sends a command and awaits its event. Raises the BatonError that the engine answered, or DEADLINE.

        `on_answer` is called with a successful event in the engine's order of events, even where the caller
        was cancelled: a reservation that the engine has made must not be lost.
        """
        if len(self._calls) >= _MAX_CALLS:
            raise BatonError(ErrorKind.OVERLOADED, f"{_MAX_CALLS} calls wait for the engine already")
        if self._closed:
            raise self._closed
        command.id = next(self._ids)
        call = self._calls[command.id] = _Call(asyncio.get_running_loop().create_future(), on_answer)
        await self.send(command)
        try:
            async with asyncio.timeout(timeout_s):
                return _checked(await call.future)
        except TimeoutError as error:
            raise BatonError(ErrorKind.DEADLINE, f"the engine did not answer within {timeout_s} s") from error

    async def send(self, command: EngineCommand) -> None:
        """Sends a command without awaiting an answer."""
        if self._closed:
            raise self._closed
        await self._channel.send(command)

    async def stream(
        self, command: EngineCommand, on_end: Callable[[PrefillEndedEvent], None] | None = None
    ) -> AsyncIterator[EngineEvent]:
        """Sends a prefill and yields its events until its end, which `on_end` is called with. Raises the
        BatonError it failed with."""
        command.id = next(self._ids)
        queue: asyncio.Queue[EngineEvent] = asyncio.Queue(_events_of(command.prefill))
        self._streams[command.id] = queue
        try:
            await self.send(command)
            while True:
                event = _checked(await queue.get())
                if event.WhichOneof("event") == "prefill_ended":
                    self.prefills_finished += 1
                    if on_end is not None:
                        on_end(event.prefill_ended)
                    return
                yield event
        finally:
            self._streams.pop(command.id, None)

    def _dispatch(self, event: EngineEvent, on_event: Callable[[EngineEvent], None]) -> None:
        if event.id in self._streams:
            self._streams[event.id].put_nowait(event)
        elif event.id in self._calls:
            self._calls.pop(event.id).answer(event)
        elif event.id == 0:
            on_event(event)
        # Any other belongs to a prefill whose caller has gone.

    def _fail_all(self) -> None:
        failed = failed_event(self._closed or ChannelClosedError())
        for call in self._calls.values():
            call.answer(failed)
        self._calls.clear()
        for queue in self._streams.values():
            if not queue.full():
                queue.put_nowait(failed)


def _events_of(request: PrefillRequest) -> int:
    """The most events that a prefill may have, so that a slow reader never blocks the dispatch of others."""
    if not request.prompt_logprobs:
        return _EVENTS_A_PREFILL
    return _EVENTS_A_PREFILL + -(-len(request.token_ids) // PROMPT_LOGPROBS_A_MESSAGE)


def _checked(event: EngineEvent) -> EngineEvent:
    if event.WhichOneof("event") == "failed":
        raise _error(event)
    return event


def _error(event: EngineEvent) -> BatonError:
    failed = event.failed
    return BatonError(
        ErrorKind(failed.kind),
        failed.message,
        cause=FailureCause(failed.cause) if failed.cause else None,
    )
