"""The life of a request in the router, from admission to its last token.

 1. ADMITTED      it takes a place in the waiting room, or is refused where that is full
 2. RESERVED      a pair has room in our counters, and decode promised a slot (Reserve) or is sure to
 3. PREFILLING    prefill has the request; a ticket that decode was sure to give follows (GiveTicket)
 4. FIRST_TOKEN   prefill sampled the next token; the client sees it now
 5. HANDED_OFF    decode has the KV, says prefill's call or decode's own stream
 6. DECODING      decode's stream said something prefill had not
 7. ENDED         slot and counters are given back

Steps 2 to 6 are one attempt. A worker that is lost, gives the sequence back (MOVED) or breaks a
call costs the attempt, not the request: the next one prefills prompt and emitted ids elsewhere
and goes on at the next number. Whatever ends an attempt early cancels its prefill call and tells
decode, which is repeated beside the way until decode answers. A prompt of which only the logprobs
are asked goes to prefill alone, without steps 2, 4, 5 and 6.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind
from baton.v1.router_pb2 import RequestTrace, Stage, StageTime, Usage
from baton.v1.types_pb2 import FinishReason
from services.common.observability.logs import get_log
from services.router.lifecycle.attempt import AttemptCalls
from services.router.lifecycle.journal_entry import JournalEntry
from services.router.lifecycle.observations import CANCELLED, Ended
from services.router.lifecycle.outbox import Outbox
from services.router.lifecycle.prompt_run import run_prompt
from services.router.request.output_state import Sequence
from services.router.request.request import Finish
from services.router.workers.worker_error import (
    WORTH_ANOTHER,
    WorkerError,
    for_client,
    public_text,
    router_fault,
)

if TYPE_CHECKING:
    from baton.state import Journal
    from baton.v1.decode_pb2 import Ticket
    from services.router.lifecycle.cancels import Cancels
    from services.router.lifecycle.observations import Observations
    from services.router.lifecycle.unread import Unread
    from services.router.request.request import Request
    from services.router.text.output_text import OutputText
    from services.router.workers.block_wait import Place
    from services.router.workers.placement import Claim
    from services.router.workers.prefix_affinity import Prefixes, Prompt
    from services.router.workers.waiting_queue import WaitingRoom

# A prompt ahead of its ticket has this start, in seconds, before the ticket is asked for: the two calls do
# not meet on their way, and the ticket still comes before the first token.
_HEAD_START_S = 0.004

_DECODING = Stage.STAGE_DECODING

_log = get_log("dispatch")


@dataclass(frozen=True, slots=True)
class LifecycleDeps:
    """What the lifecycles of all requests share. `max_attempts`: of one request."""

    room: WaitingRoom
    cancels: Cancels
    max_attempts: int
    observations: Observations
    prefixes: Prefixes
    unread: Unread
    journal: Journal | None = None


class Life:
    """One request. `run` never raises but for its own cancellation: errors go to the outbox."""

    def __init__(self, deps: LifecycleDeps, request: Request, text: OutputText, news: asyncio.Event) -> None:
        self._deps = deps
        self._request = request
        self._text = text
        # Its place in the order of arrival, kept from attempt to attempt.
        self._place_number: Place | None = None
        self._calls: AttemptCalls | None = None
        self._sequence = Sequence(request)
        self._sequence.on_tokens = self._heard
        self._shown = 0
        self._over = False
        self._failures = 0
        self._emitted_at_move = -1
        self._bytes_shipped = 0
        self._exposed_ns = 0
        self._pair = ("", "")
        # Its blocks' names, once it is dispatched.
        self._named: Prompt | None = None
        self._stages: dict[Stage.ValueType, int] = {}
        # For the record: when a pair first had room, when tokens were last shown, how it ended.
        self._placed_ns: int | None = None
        self._shown_at: int | None = None
        self._outcome = ""
        self.outbox = Outbox(news, deps.unread)

    async def run(self) -> None:
        """Attempts until one comes to the output's end."""
        self._mark(Stage.STAGE_ADMITTED)
        entry = JournalEntry(self._deps.journal, self._request)
        self.outbox.receipt = entry.receipt
        try:
            async with asyncio.timeout_at(self._request.deadline):
                while not await self._attempt(entry):
                    pass
        except TimeoutError:
            self._fail(BatonError(ErrorKind.DEADLINE, "the request's deadline passed"))
        except BatonError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._fail(BatonError(ErrorKind.UNAVAILABLE, "the request was cancelled"))
            self._outcome = CANCELLED
            raise
        except Exception as error:  # a fault of ours must not leave a client waiting for ever
            self._fail(router_fault(self._request.id, error))
        finally:
            if self._place_number is not None:
                self._deps.room.ended(self._place_number)
            entry.close()
            self._deps.observations.ended(self._record())

    async def _attempt(self, entry: JournalEntry) -> bool:
        """One dispatch; False where another is due. Whatever happens, nothing of it is left behind."""
        if self._request.max_tokens == 0 and self._sequence.prompt_told:
            self._end(Finish.LENGTH)
            return True
        self._sequence.begin(self._sequence.attempt + 1)
        entry.attempt(self._sequence.attempt)
        until = asyncio.get_running_loop().time() + self._deps.room.timeout_s
        if self._request.max_tokens == 0:
            await self._run_prompt(until)
            return False
        while not await self._try_pair(await self._claim(until)):
            pass
        return self._over or self._complete()

    async def _try_pair(self, claim: Claim) -> bool:
        """Runs the attempt on this pair; False where decode had no room for it, and another pair may."""
        if self._placed_ns is None:
            self._placed_ns = self._elapsed_ns()
        calls = AttemptCalls(self._request, self._sequence, claim, self._deps.cancels, self._names(claim))
        self._calls = calls
        self._pair = (claim.prefill.name, claim.decode.name)
        early = claim.sure_of_room
        try:
            if early:
                self._prefill(calls, None)  # Reserve's way there and back costs the first token nothing
                await asyncio.sleep(_HEAD_START_S)
            try:
                ticket = await calls.reserve()
            except BatonError as error:
                if error.kind is not ErrorKind.OVERLOADED:
                    raise
                self._deps.room.refused(self._place()[0], claim.decode)
                calls.refused()
                return early  # what prefill may have told is this attempt's, so the next has its own number
            self._deps.room.ended(self._place()[0])
            if early:
                await calls.give(ticket)
            else:
                self._prefill(calls, ticket)
            await self._follow_output(calls)
        except BatonError as error:
            self._count_failure(error)
        finally:
            calls.abandon()
            self._calls = None
            self._bytes_shipped += calls.bytes_shipped
        return True

    def _prefill(self, calls: AttemptCalls, ticket: Ticket | None) -> None:
        self._mark(Stage.STAGE_RESERVED)
        calls.prefill(ticket)
        self._mark(Stage.STAGE_PREFILLING)

    async def _run_prompt(self, until: float) -> None:
        """An attempt at a prompt whose logprobs are all that is asked."""
        place, fresh = self._place()
        tokens = len(self._request.prompt_ids)
        claim = await self._deps.room.claim_prefill(place, self._request.call, tokens, until, fresh=fresh)
        self._pair = (claim.prefill.name, "")
        self._mark(Stage.STAGE_PREFILLING)
        try:
            await run_prompt(self._request, self._sequence, claim)
        except BatonError as error:
            self._count_failure(error)

    async def _claim(self, until: float) -> Claim:
        place, fresh = self._place()
        tokens = len(self._request.prompt_ids) + len(self._sequence.emitted)
        left = self._request.max_tokens - len(self._sequence.emitted)
        prefixes = self._deps.prefixes
        if self._named is None:
            self._named = await prefixes.name(self._request.prompt_ids)
        cached = partial(prefixes.cached_tokens, prompt=self._named)
        claim = await self._deps.room.claim(
            place, self._request.call, tokens, left, until, fresh=fresh, cached=cached
        )
        for worker in {claim.prefill, claim.decode}:
            prefixes.sent(worker, self._named)
        return claim

    def _names(self, claim: Claim) -> tuple[bytes, ...]:
        """Of the prompt's blocks, so that those that decode holds are not sent. None once an attempt has
        failed: should the two workers not agree what a name stands for, the next attempt uses none."""
        if self._named is None or self._failures or claim.decode.prefills_itself:
            return ()
        return self._named.of(claim.decode)

    def _place(self) -> tuple[Place, bool]:
        """The place in the waiting queue, and whether it is a new one."""
        if self._place_number is not None:
            return self._place_number, False
        self._place_number = self._deps.room.next_place(self._request.call)
        return self._place_number, True

    async def _follow_output(self, calls: AttemptCalls) -> None:
        """Judges what is reported until the output ends or the sequence was moved; tokens show themselves."""
        sequence = self._sequence
        while True:
            if self._text.stopped:
                calls.abandon()
                return await self._end_well(calls, Finish.STOP)
            if sequence.fault is not None:
                raise sequence.fault
            if sequence.ending and sequence.prompt_told:
                return await self._ended(calls)
            if sequence.lost is not None:
                raise sequence.lost
            if calls.prefill_error is not None:
                await self._look_into(calls)
                continue
            self._note_handoff(calls)
            await sequence.changed()

    def _heard(self) -> None:
        """Tokens came: whoever brings them carries them through to the outbox, without a switch of tasks.
        What is due of the prompt comes before all else, though decode's stream may overtake prefill's."""
        if not self._sequence.prompt_told:
            return
        try:
            if _DECODING not in self._stages:
                self._mark_progress()
            self._show()
        except Exception as error:  # a fault of ours is this request's, and not its reader's
            self._sequence.fail(router_fault(self._request.id, error))
        if self._text.stopped:
            self._sequence.wake()

    def _mark_progress(self) -> None:
        if self._sequence.emitted:
            self._mark(Stage.STAGE_FIRST_TOKEN)
        if self._sequence.followed:
            self._mark(Stage.STAGE_HANDED_OFF)
        if self._sequence.decoding:
            self._mark(_DECODING)

    def _show(self) -> None:
        """Gives what is new to the client, up to the token that completes a stop string."""
        sequence = self._sequence
        before = self._shown
        while self._shown < len(sequence.emitted) and not self._text.stopped:
            if self._shown == 0:
                self.outbox.put_prompt(sequence.take_prompt_logprobs())
            token_id, offset = sequence.emitted[self._shown], self._text.length
            logprobs = sequence.logprobs.popleft() if sequence.logprobs else None
            self._shown += 1
            self.outbox.put(token_id, self._text.push(token_id), offset, logprobs)
        if self._shown > before:
            self._shown_at = self._deps.observations.shown(self._shown - before, self._shown_at)

    async def _ended(self, calls: AttemptCalls) -> None:
        """A worker says that it is over. Prefill's word stands above decode's: a first token that
        ends the request releases the ticket, which decode may report first, as a cancel."""
        if self._sequence.ending == FinishReason.FINISH_REASON_CANCELLED:
            await calls.settle()
        ending = self._sequence.ending
        self._note_handoff(calls)
        if self._sequence.ended_by_decode:
            calls.finish()
        if ending == FinishReason.FINISH_REASON_PREEMPTED:
            self._count_move()
        elif ending == FinishReason.FINISH_REASON_CANCELLED:
            raise calls.prefill_error or BatonError(ErrorKind.UNAVAILABLE, "decode dropped the sequence")
        else:
            await self._end_well(calls, Finish.STOP if self._text.stopped else Finish(ending))

    async def _end_well(self, calls: AttemptCalls, finish: Finish) -> None:
        """An end whose usage and trace are whole, unless prefill is away."""
        await calls.hear_prefill()
        self._note_handoff(calls)
        self._end(finish)

    async def _look_into(self, calls: AttemptCalls) -> None:
        """Prefill's call failed: goes on where decode has the sequence, else raises the reason."""
        error, calls.prefill_error = calls.prefill_error, None
        assert error is not None
        if error.kind not in WORTH_ANOTHER or not self._sequence.prompt_told or not await calls.went_on():
            raise error

    def _count_failure(self, error: BatonError) -> None:
        """Raises where another attempt would be one too many, or as useless as this one."""
        self._deps.observations.attempt_failed(error.kind)
        if error.kind not in WORTH_ANOTHER:
            raise error
        self._failures += 1
        _log.warning(
            "attempt_failed",
            request=self._request.id.hex(),
            attempt=self._sequence.attempt,
            kind=error.kind.name,
            reason=error.message,
        )
        if self._failures >= self._deps.max_attempts:
            message = f"gave up after {self._failures} attempts: {public_text(error)}"
            raise BatonError(ErrorKind.UNAVAILABLE, message) from error

    def _count_move(self) -> None:
        """A move costs no attempt as long as tokens came since the last one; else raises what the attempt
        failed with."""
        emitted = len(self._sequence.emitted)
        if emitted == self._emitted_at_move:
            raise BatonError(ErrorKind.UNAVAILABLE, "moved without a token")
        self._emitted_at_move = emitted

    def _complete(self) -> bool:
        """Ends an output whose last token came but not the word that it was the last."""
        if not self._sequence.prompt_told:
            return False
        emitted = self._sequence.emitted
        if self._text.stopped or (emitted and emitted[-1] in self._request.stop_token_ids):
            self._end(Finish.STOP)
        elif len(emitted) >= self._request.max_tokens:
            self._end(Finish.LENGTH)
        else:
            return False
        return True

    def _end(self, finish: Finish) -> None:
        self._over = True
        self._outcome = finish.name.lower()
        if self._shown == 0:
            self.outbox.put_prompt(self._sequence.take_prompt_logprobs())
        rest = self._text.finish()
        self._mark(Stage.STAGE_ENDED)
        usage = Usage(
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=self._shown,
            cached_tokens=self._sequence.cached_tokens or 0,
        )
        self.outbox.end(rest, finish, usage, self._trace())

    def _trace(self) -> RequestTrace:
        prefill, decode = self._pair
        shipped = self._bytes_shipped + (self._calls.bytes_shipped if self._calls is not None else 0)
        stages = [StageTime(stage=stage, offset_ns=offset) for stage, offset in sorted(self._stages.items())]
        return RequestTrace(
            prefill_worker=prefill,
            decode_worker=decode,
            attempts=self._sequence.attempt,
            kv_bytes_shipped=shipped,
            seed=self._request.sampling.seed,
            stages=stages,
            handoff_exposed_ns=self._exposed_ns,
        )

    def _note_handoff(self, calls: AttemptCalls) -> None:
        if calls.handed_off is not None:
            self._mark(Stage.STAGE_HANDED_OFF)
            self._exposed_ns = calls.handed_off.exposed_ns

    def _mark(self, stage: Stage.ValueType) -> None:
        """Notes when a stage was first reached, in nanoseconds since the request arrived."""
        self._stages.setdefault(stage, self._elapsed_ns())

    def _elapsed_ns(self) -> int:
        return time.monotonic_ns() - self._request.arrived_ns

    def _record(self) -> Ended:
        prefill, decode = self._pair
        return Ended(
            request_id=self._request.id,
            outcome=self._outcome,
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=self._shown,
            cached_tokens=self._sequence.cached_tokens or 0,
            attempts=self._sequence.attempt,
            kv_bytes_shipped=self._bytes_shipped,
            prefill_worker=prefill,
            decode_worker=decode,
            reached=self._stages,
            placed_ns=self._placed_ns,
            last_token_ns=None if self._shown_at is None else self._shown_at - self._request.arrived_ns,
            ended_ns=self._elapsed_ns(),
        )

    def _fail(self, error: BatonError) -> None:
        if isinstance(error, WorkerError):
            _log.warning(
                "request_failed", request=self._request.id.hex(), kind=error.kind.name, reason=error.message
            )
        self._outcome = error.kind.name.lower()
        error.tokens_sent = self._shown > 0
        self.outbox.fail(for_client(error))
