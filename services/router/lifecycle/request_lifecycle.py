"""The lifecycle of a request in the router, from admission to its last token.

 1. ADMITTED      it enters the waiting queue, or is refused if that is full
 2. RESERVED      a pair of workers has room by our counters, and decode has reserved a slot or surely will
 3. PREFILLING    prefill has the request; if it started before the reservation, the ticket follows
 4. FIRST_TOKEN   prefill sampled the next token, which is delivered at once
 5. HANDED_OFF    decode has the KV, as prefill's call or decode's own stream reports
 6. DECODING      decode's stream brought a token that prefill had not
 7. ENDED         slot and counters are released

Steps 2 to 6 are one attempt. A worker that is lost, preempts the sequence or fails a call ends the
attempt, not the request: the next attempt prefills the prompt and the emitted ids elsewhere and continues at
the next number. An attempt that ends early cancels its prefill call and its reservation; the cancel is
repeated in the background until decode answers. A prompt without output (only its logprobs are asked for)
needs prefill alone, without steps 2, 4, 5 and 6.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.state import Journal, JournalRecord
from baton.v1.journal_pb2 import AcceptedRequest
from baton.v1.router_pb2 import Stage
from services.common.observability.logs import get_log
from services.router.lifecycle.attempt import Attempt, Incomplete
from services.router.lifecycle.attempt_calls import AttemptCalls
from services.router.lifecycle.cancels import Cancels
from services.router.lifecycle.observations import CANCELLED, Observations
from services.router.lifecycle.outbox import Outbox, UnreadBudget
from services.router.lifecycle.output_state import OutputState
from services.router.lifecycle.prefill_call import PrefillCall
from services.router.lifecycle.timeline import RequestTimeline
from services.router.placement.claim import Claim
from services.router.placement.fitting import FailedPair
from services.router.placement.prefix_affinity import PrefixAffinity, PromptBlocks
from services.router.queue.entry import QueueEntry
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.limits import kind_of
from services.router.request.request import Finish, Request
from services.router.text.output_text import OutputText
from services.router.workers.worker import Worker
from services.router.workers.worker_error import RETRIED_KINDS, WorkerError, client_error, internal_error

_log = get_log("dispatch")

# Seconds by which the client's deadline of a call may pass before the router's: at most what the call took to
# arrive. A gRPC client cancels its call then.
_CLIENT_CLOCK_S = 0.05


@dataclass(frozen=True, slots=True)
class LifecycleDeps:
    """Dependencies of every request. `max_attempts`: failed attempts after which a request fails.
    `output_text`: makes the text side of a request's output. `journal`: None without a state store."""

    queue: WaitingQueue
    cancels: Cancels
    max_attempts: int
    observations: Observations
    prefixes: PrefixAffinity
    unread: UnreadBudget
    output_text: Callable[[Request], OutputText]
    journal: Journal | None = None


class RequestLifecycle:
    """One request. `run` raises nothing but its own cancellation: errors go to the outbox."""

    def __init__(self, deps: LifecycleDeps, request: Request, available: asyncio.Event) -> None:
        """`available` is set whenever `outbox` has something."""
        self._deps = deps
        self._request = request
        self._timeline = RequestTimeline(request)
        counts_reasoning = request.structure is not None and request.structure.reasoning
        self.outbox = Outbox(available, deps.unread, offsets=counts_reasoning)
        self._output = OutputState(
            request, deps.output_text(request), self.outbox, self._timeline, deps.observations
        )
        # Its entry in the waiting queue, once it has entered.
        self._entry: QueueEntry | None = None
        # The hashes of its prompt's blocks, once it was dispatched.
        self._blocks: PromptBlocks | None = None
        # The worker that has decoded its output to the end.
        self._decoded_by: Worker | None = None
        self._failures = 0
        # Until when it waits for workers with room, on the event loop's clock; None while an attempt runs.
        self._waits_until: float | None = None
        self._emitted_at_move = -1
        self._outcome = ""

    @property
    def request_id(self) -> bytes:
        """Names the request in logs."""
        return self._request.id

    @property
    def output_tokens(self) -> int:
        """Number of tokens that were delivered."""
        return self._output.delivered

    async def run(self) -> None:
        """Makes attempts until the output is complete or the request fails."""
        journal = self._deps.journal
        try:
            async with asyncio.timeout_at(self._request.deadline):
                self._timeline.mark(Stage.STAGE_ADMITTED)
                if journal is not None:
                    left_s = self._request.deadline - asyncio.get_running_loop().time()
                    self.outbox.receipt = journal.append(_record_of(self._request), left_s)
                finish = self._output.finish()
                while finish is None:
                    finish = await self._attempt() or self._output.finish()
            self._outcome = finish.name.lower()
            self._output.end(finish)
            if self._decoded_by is not None and self._blocks is not None:
                self._deps.prefixes.output_ended(
                    self._decoded_by, self._blocks, self._request.prompt_ids, self._output.emitted
                )
        except TimeoutError:
            self._fail(_deadline_passed())
        except BatonError as error:
            self._fail(error)
        except asyncio.CancelledError:
            if asyncio.get_running_loop().time() >= self._request.deadline - _CLIENT_CLOCK_S:
                self._fail(_deadline_passed())
            else:
                self._fail(BatonError(ErrorKind.UNAVAILABLE, "the request was cancelled"))
                self._outcome = CANCELLED
            raise
        except Exception as error:  # an internal error must not leave the client waiting
            self._fail(internal_error(self._request.id, error))
        finally:
            if self._entry is not None:
                self._deps.queue.ended(self._entry)
            if journal is not None:
                journal.close(self._request.id)
            trace = self._timeline.trace(self._output.attempt)
            self._deps.observations.ended(
                self._request, self._outcome, self._output.usage, trace, self._timeline
            )

    async def _attempt(self) -> Finish | None:
        """Makes one attempt. Returns how a worker reported the output's end, None if it did not."""
        self._output.begin(self._output.attempt + 1)
        if self._deps.journal is not None and self._output.attempt > 1:
            self._deps.journal.mark_attempt(self._request.id, self._output.attempt)
        if self._request.max_tokens == 0:
            await self._run_prompt()
            return None
        result: Finish | Incomplete = Incomplete.NO_ROOM
        while result is Incomplete.NO_ROOM:
            claim = await self._claim()
            try:
                result = await self._run_on(claim)
                if result is Incomplete.PREEMPTED:
                    self._check_progress()
            except BatonError as error:
                self._attempt_ended(error, FailedPair(claim.prefill, claim.decode))
                return None
        if result is not Incomplete.NO_ROOM_AFTER_PREFILL:
            self._waits_until = None
        return result if isinstance(result, Finish) else None

    def _attempt_ended(self, error: BatonError, pair: FailedPair) -> None:
        """Records that an attempt ended with an error. A worker whose queue is full is waited for. All else
        counts as a failure (see `_count_failure`), except the first time that a link fails it while there are
        other pairs: they may be links whose pause has just ended, each in its turn. The next attempt avoids
        the pair."""
        if error.kind is ErrorKind.OVERLOADED:
            return
        self._waits_until = None
        entry, prompt = self._enter_queue(), len(self._request.prompt_ids)
        new = pair not in entry.failed
        entry.failed.append(pair)
        computed, total = prompt + len(self._output.emitted), prompt + self._request.max_tokens
        elsewhere = (
            new
            and error.cause is FailureCause.LINK
            and self._deps.queue.has_other_pair(entry, computed, total)
        )
        self._count_failure(error, counts=not elsewhere)

    def _wait_until(self) -> float:
        """Time until which the request waits for room. Refusals of full workers do not restart the wait."""
        now, timeout_s = asyncio.get_running_loop().time(), self._deps.queue.timeout_s
        if self._waits_until is None:
            self._waits_until = now + timeout_s
        elif now >= self._waits_until:
            raise BatonError(ErrorKind.OVERLOADED, f"no slot became free within {timeout_s:g} s")
        return self._waits_until

    async def _claim(self) -> Claim:
        """Waits in the queue for a pair of workers."""
        until = self._wait_until()
        prefixes, emitted = self._deps.prefixes, len(self._output.emitted)
        entry, prompt = self._enter_queue(), self._request.prompt_ids
        if self._blocks is None:
            self._blocks = await prefixes.hash_prompt(prompt, self._request.tenant)
        cached = partial(prefixes.cached_tokens, prompt=self._blocks)
        left = self._request.max_tokens - emitted
        return await self._deps.queue.claim(entry, len(prompt) + emitted, left, until, cached)

    def _prepared(self, claim: Claim) -> Attempt:
        """The attempt on this pair; `run` releases the claim."""
        try:
            if self._blocks is not None:
                for worker in {claim.prefill, claim.decode}:
                    self._deps.prefixes.prompt_sent(worker, self._blocks)
            self._timeline.placed(claim.prefill.name, claim.decode.name, claim.reason)
            hashes = self._block_hashes(claim)
            calls = AttemptCalls(self._request, self._output, claim, self._deps.cancels, hashes)
            return Attempt(calls, claim, self._output, self._timeline, self._deps.queue, self._enter_queue())
        except BaseException:
            claim.release()
            raise

    async def _run_on(self, claim: Claim) -> Finish | Incomplete:
        """Runs the attempt on this pair."""
        result = await self._prepared(claim).run()
        if isinstance(result, Finish) and self._output.decode_started:
            self._decoded_by = claim.decode
        if isinstance(result, Finish) and self._output.attempt == 1:
            tokens = self._output.usage.completion_tokens
            if (tpot_s := self._timeline.latencies_s(tokens).get("tpot")) is not None:
                claim.decoded(tokens, tpot_s)
        return result

    async def _run_prompt(self) -> None:
        """Makes an attempt at a prompt without output: prefill computes its logprobs, and there is no
        ticket."""
        tokens = len(self._request.prompt_ids)
        claim = await self._deps.queue.claim_prefill(self._enter_queue(), tokens, self._wait_until())
        call = PrefillCall(self._request, self._output, claim)
        try:
            self._timeline.placed(claim.prefill.name)
            self._timeline.mark(Stage.STAGE_PREFILLING)
            call.start(None)
            while not call.ended and self._output.error is None:
                await self._output.changed()
            if (error := self._output.error or call.error) is not None:
                raise error
        except BatonError as error:
            self._attempt_ended(error, FailedPair(claim.prefill, None))
        finally:
            call.cancel()
            claim.release()

    def _enter_queue(self) -> QueueEntry:
        """The request's entry in the waiting queue, the same for all attempts."""
        if self._entry is None:
            waited_s = (time.monotonic_ns() - self._request.arrived_ns) / 1e9
            request = self._request
            self._entry = self._deps.queue.enter(request.call, request.slo, waited_s, request.deadline)
            self._entry.logprobs = request.sampling.logprobs if request.wants_logprobs else None
            self._entry.output_format = kind_of(request.grammar) if request.max_tokens else ""
        return self._entry

    def _block_hashes(self, claim: Claim) -> tuple[bytes, ...]:
        """Hashes of the prompt's blocks, so that decode's prefix-cache hits are not sent. None after a failed
        attempt, in case the two workers disagree about the content of a hash."""
        if self._blocks is None or self._enter_queue().failed or claim.prefills_itself:
            return ()
        return self._blocks.hashes_for(claim.decode)

    def _count_failure(self, error: BatonError, *, counts: bool) -> None:
        """Takes a failed attempt; raises if another one could not succeed or, where it `counts`, would be one
        too many. A refusal as invalid by a worker is the client's fault for a grammar alone: all else was
        checked before."""
        if (
            isinstance(error, WorkerError)
            and error.kind is ErrorKind.INVALID
            and self._request.grammar is None
        ):
            error = error.of_worker()
        self._deps.observations.attempt_failed(error.kind)
        self._timeline.failed(error.kind.name.lower())
        if error.kind not in RETRIED_KINDS:
            raise error
        self._failures += counts
        _log.warning(
            "attempt_failed",
            request=self._request.id.hex(),
            attempt=self._output.attempt,
            kind=error.kind.name,
            reason=error.message,
        )
        if self._failures >= self._deps.max_attempts:
            message = f"gave up after {self._failures} attempts: {client_error(error).message}"
            raise BatonError(ErrorKind.UNAVAILABLE, message) from error

    def _check_progress(self) -> None:
        """A move is not a failure if tokens came since the last one; otherwise raises BatonError."""
        emitted = len(self._output.emitted)
        if emitted == self._emitted_at_move:
            raise BatonError(ErrorKind.UNAVAILABLE, "moved without a token")
        self._emitted_at_move = emitted

    def _fail(self, error: BatonError) -> None:
        if isinstance(error, WorkerError):
            _log.warning(
                "request_failed", request=self._request.id.hex(), kind=error.kind.name, reason=error.logged
            )
        self._outcome = error.kind.name.lower()
        error.tokens_sent = self._output.delivered > 0
        self.outbox.fail(client_error(error))


def _deadline_passed() -> BatonError:
    return BatonError(ErrorKind.DEADLINE, "the request's deadline passed")


def _record_of(request: Request) -> JournalRecord:
    """Returns the record that another router would need to continue the request. The prompt's text is not
    included."""
    details = AcceptedRequest(
        sampling=request.sampling,
        limits=request.limits,
        stop=request.stop,
        skip_special_tokens=request.skip_special_tokens,
        echo=request.echo is not None,
        choice=request.choice,
        grammar=request.grammar,
    )
    return JournalRecord(request.id, request.tenant, request.prompt_ids, details=details.SerializeToString())
