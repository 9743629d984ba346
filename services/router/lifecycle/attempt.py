"""One attempt to run a request on a pair of workers, from the reservation to its end."""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.v1.decode_pb2 import Ticket
from baton.v1.router_pb2 import Stage
from baton.v1.types_pb2 import FinishReason
from services.router.lifecycle.attempt_calls import PREFILL_END_S, AttemptCalls
from services.router.lifecycle.output_state import OutputState
from services.router.lifecycle.timeline import RequestTimeline
from services.router.placement.claim import Claim
from services.router.queue.entry import QueueEntry
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.request import Finish
from services.router.workers.worker_error import RETRIED_KINDS

# Seconds for which an early prefill is sent before the slot is reserved: then the two calls do not delay each
# other, and the ticket still arrives before the first token.
HEAD_START_S = 0.004


class Incomplete(Enum):
    """The reason why an attempt ended, without failing, before the output was complete."""

    # Decode had no room. Prefill was not asked, so another pair may run the same attempt.
    NO_ROOM = auto()
    # The same after an early prefill. What it may have reported belongs to this attempt's number.
    NO_ROOM_AFTER_PREFILL = auto()
    # Decode preempted the sequence.
    PREEMPTED = auto()


class Attempt:
    """Runs one attempt, once. Whatever happens, nothing of it is left at the workers without a cancel under
    way."""

    def __init__(
        self,
        calls: AttemptCalls,
        claim: Claim,
        output: OutputState,
        timeline: RequestTimeline,
        queue: WaitingQueue,
        entry: QueueEntry,
    ) -> None:
        """`entry`: the request's in the waiting queue."""
        self._calls = calls
        self._queue = queue
        self._entry = entry
        self._decode = claim.decode
        self._output = output
        self._timeline = timeline
        # Whether prefill starts before decode has reserved, which hides Reserve's round trip.
        self._early = claim.has_certain_room

    async def run(self) -> Finish | Incomplete:
        """Runs to the end of the output, or of the attempt; raises BatonError where it failed."""
        calls = self._calls
        try:
            if self._early:
                self._start_prefill(None)
                await asyncio.sleep(HEAD_START_S)
            try:
                ticket = await calls.reserve()
            except BatonError as error:
                if error.kind is not ErrorKind.OVERLOADED:
                    raise
                if error.cause is FailureCause.BLOCKS:
                    self._queue.refused(self._entry, self._decode)
                calls.refused()
                return Incomplete.NO_ROOM_AFTER_PREFILL if self._early else Incomplete.NO_ROOM
            self._queue.ended(self._entry)
            if self._early:
                await calls.provide_ticket(ticket)
            else:
                self._start_prefill(ticket)
            return await self._follow_output()
        finally:
            calls.abandon()
            self._timeline.kv_bytes_shipped += calls.kv_bytes_shipped

    def _start_prefill(self, ticket: Ticket | None) -> None:
        self._timeline.mark(Stage.STAGE_RESERVED)
        self._calls.prefill.start(ticket)
        self._timeline.mark(Stage.STAGE_PREFILLING)

    async def _follow_output(self) -> Finish | Incomplete:
        """Waits for the end of the output or of the attempt. Tokens are delivered without this task."""
        output, prefill = self._output, self._calls.prefill
        while True:
            if output.stopped:
                self._calls.abandon()
                return await self._finish(Finish.STOP)
            if output.error is not None:
                raise output.error
            if output.ending and output.prompt_complete:
                return await self._ended_by_worker()
            if output.attempt_error is not None:
                raise output.attempt_error
            if prefill.error is not None:
                await self._check_prefill_error()
                continue
            self._mark_handoff()
            await output.changed()

    async def _ended_by_worker(self) -> Finish | Incomplete:
        """A worker reported the end. Prefill's report takes precedence over a cancel by decode: a first token
        that ends the output releases the ticket, which decode may report first."""
        output = self._output
        if output.ending == FinishReason.FINISH_REASON_CANCELLED:
            await self._calls.prefill.wait(PREFILL_END_S)
        ending = output.ending
        self._mark_handoff()
        if output.ended_by_decode:
            self._calls.finish()
        if ending == FinishReason.FINISH_REASON_PREEMPTED:
            return Incomplete.PREEMPTED
        if ending == FinishReason.FINISH_REASON_CANCELLED:
            dropped = BatonError(ErrorKind.UNAVAILABLE, "decode dropped the sequence")
            raise self._calls.prefill.error or output.attempt_error or dropped
        return await self._finish(Finish.STOP if output.stopped else Finish(ending))

    async def _finish(self, finish: Finish) -> Finish:
        """Completes usage and trace as far as prefill answers in time."""
        await self._calls.wait_for_cached_tokens()
        self._mark_handoff()
        return finish

    async def _check_prefill_error(self) -> None:
        """Raises the error of prefill's call, unless decode continues the sequence."""
        prefill = self._calls.prefill
        error, prefill.error = prefill.error, None
        assert error is not None
        retried = error.kind in RETRIED_KINDS and self._output.prompt_complete
        if not retried or not await self._calls.decode_has_sequence():
            raise error

    def _mark_handoff(self) -> None:
        handed_off = self._calls.prefill.handed_off
        if handed_off is not None:
            self._timeline.mark(Stage.STAGE_HANDED_OFF)
            self._timeline.handoff_exposed_ns = handed_off.exposed_ns
