"""A request's output across its attempts: what was emitted, what was delivered, and how the attempt
stands."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import SequenceOutput
from baton.v1.prefill_pb2 import FirstToken, PromptLogprobs
from baton.v1.router_pb2 import Stage, Usage
from baton.v1.types_pb2 import FinishReason, Logprobs
from services.router.lifecycle.observations import Observations
from services.router.lifecycle.outbox import Outbox
from services.router.lifecycle.timeline import RequestTimeline
from services.router.request.request import Finish, Request
from services.router.text.output_text import OutputText
from services.router.workers.worker_error import WorkerError, internal_error

# Read with each token: an attribute of the wrapper of an enum takes a microsecond.
_DECODING = Stage.STAGE_DECODING
# Finish reasons that a later report does not replace.
_FINAL = (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)


class OutputState:
    """Takes the reports of two token streams, prefill's and decode's, about one output.

    Both streams number each token, so duplicates are dropped and gaps are noticed. Only reports of the
    running attempt count. New tokens are detokenised and put into the outbox within the report, without a
    task switch; the request's own task is woken (`changed`) only when there is something to decide.

    `emitted` has at most the request's max_tokens: more is an error of the worker.
    """

    def __init__(
        self,
        request: Request,
        text: OutputText,
        outbox: Outbox,
        timeline: RequestTimeline,
        observations: Observations,
    ) -> None:
        self._request = request
        self._text = text
        self._outbox = outbox
        self._timeline = timeline
        self._observations = observations
        self._changed = asyncio.Event()
        self._wants_logprobs = request.wants_logprobs
        self.emitted: list[int] = []
        # The emitted tokens that are not delivered: until the prompt's logprobs are complete, and after a
        # stop string. With each its logprobs, if asked for, serialised: a message would keep the whole
        # response alive that it came in.
        self._undelivered: deque[tuple[int, bytes | None]] = deque()
        # Every token of the prompt but the first has logprobs.
        self._prompt_due = len(request.prompt_ids) - 1 if request.wants_prompt_logprobs else 0
        self._prompt_received = 0
        # Until all of them have arrived.
        self._prompt_logprobs: list[bytes] = []
        # Prompt tokens that the first attempt with a token found in the prefix cache; None before that.
        self.cached_tokens: int | None = None
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Starts an attempt. Emitted tokens are kept, unless the prompt's logprobs are incomplete: then the
        prompt is run again from its beginning, and nothing was delivered yet."""
        self.attempt = attempt
        if not self.prompt_complete:
            self.emitted.clear()
            self._undelivered.clear()
        # Why a worker ended this attempt; UNSPECIFIED while it runs.
        self.ending: FinishReason.ValueType = FinishReason.FINISH_REASON_UNSPECIFIED
        # Why the request fails, whatever the attempt.
        self.error: BatonError | None = None
        # Why the attempt fails; another one may continue.
        self.attempt_error: BatonError | None = None
        # Decode has sent tokens of this attempt, so its handoff was committed.
        self.decode_started = False
        # Decode itself has ended the attempt: there is nothing to cancel.
        self.ended_by_decode = False
        # Decode has sent a token that prefill had not.
        self.decoding = False
        # Decode has reserved a slot for this attempt, and must know it from now on.
        self.reserved = False

    @property
    def prompt_complete(self) -> bool:
        """True once all of the prompt's logprobs that were asked for have arrived."""
        return self._prompt_received == self._prompt_due

    @property
    def stopped(self) -> bool:
        """True once a stop string was completed."""
        return self._text.stopped

    @property
    def delivered(self) -> int:
        """Number of tokens that were put into the outbox."""
        return len(self.emitted) - len(self._undelivered)

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and of the output that was delivered, and drafts from the prediction."""
        drafts = self._timeline.drafts
        return Usage(
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=self.delivered,
            cached_tokens=self.cached_tokens or 0,
            accepted_prediction_tokens=drafts.accepted_predicted,
            rejected_prediction_tokens=max(0, drafts.drafts_predicted - drafts.accepted_predicted),
        )

    def accept_first_token(self, attempt: int, first: FirstToken) -> None:
        """Takes the first token, which prefill has drawn."""
        if attempt == self.attempt and not self.prompt_complete:
            return self._violation("a token came before all of the prompt's logprobs")
        if attempt == self.attempt and first.number == 0:
            self.cached_tokens = min(first.cached_tokens, len(self._request.prompt_ids))
        logprobs = (first.logprobs,) if first.HasField("logprobs") else ()
        self.accept(attempt, first.number, (first.token_id,), first.finish_reason, logprobs)

    def accept_prompt_logprobs(self, attempt: int, run: PromptLogprobs) -> None:
        """Takes logprobs of the prompt, in order; drops what an earlier attempt reported already."""
        if attempt != self.attempt or self.error is not None:
            return
        known = self._prompt_received
        # The first token has none, so the index of a position is one less.
        first = run.first_position - 1
        if not 0 <= first <= known:
            return self._violation(f"the prompt's logprobs {known} to {first - 1} never came")
        new = [one.SerializeToString() for one in run.logprobs[known - first :]]
        self._prompt_logprobs += new
        self._prompt_received += len(new)
        if self._prompt_received > self._prompt_due:
            return self._violation(f"more than {self._prompt_due} logprobs of the prompt came")
        if new and self.prompt_complete:
            self._outbox.put_prompt(self._prompt_logprobs)
            self._prompt_logprobs.clear()
        if self.emitted:
            self._deliver()
        self.wake()

    def accept_decoded(self, output: SequenceOutput) -> None:
        """Takes tokens of decode's stream."""
        attempt, ids, ending = output.attempt.number, output.token_ids, output.finish_reason
        first_number = output.first_number
        if attempt == self.attempt:
            # A reservation that ended unused is reported without a token.
            self.decode_started |= bool(ids)
            self.decoding |= first_number + len(ids) > len(self.emitted)
            if ending:
                self._note_end(output)
            if output.HasField("drafts"):
                self._timeline.drafted(attempt, output.drafts)
        self.accept(attempt, first_number, ids, ending, output.logprobs if self._wants_logprobs else ())

    def _note_end(self, output: SequenceOutput) -> None:
        """Decode has ended the attempt."""
        self.ended_by_decode = True
        if output.HasField("failure") and self.attempt_error is None:
            failure = output.failure
            self.attempt_error = WorkerError(ErrorKind(failure.kind), "decode", failure.message)

    def accept(
        self,
        attempt: int,
        first_number: int,
        token_ids: Sequence[int],
        ending: FinishReason.ValueType,
        logprobs: Sequence[Logprobs] = (),
    ) -> None:
        """Takes numbered tokens; drops those that are known. A gap, a contradiction, missing logprobs or more
        than max_tokens fail the request."""
        if attempt != self.attempt or self.error is not None:
            return
        known = len(self.emitted)
        if first_number > known:
            return self._violation(f"tokens {known} to {first_number - 1} never came")
        repeated = min(known - first_number, len(token_ids)) if known > first_number else 0
        if repeated and self.emitted[first_number : first_number + repeated] != list(token_ids[:repeated]):
            return self._violation(f"token {first_number} came twice and differs")
        new = token_ids[repeated:]
        if self._wants_logprobs:
            if len(logprobs) != len(token_ids):
                return self._violation(f"{len(token_ids)} tokens came with {len(logprobs)} logprobs")
            own = (one.SerializeToString() for one in logprobs[repeated:])
            self._undelivered.extend(zip(new, own, strict=True))
        else:
            self._undelivered.extend(zip(new, itertools.repeat(None)))
        self.emitted.extend(new)
        if len(self.emitted) > self._request.max_tokens:
            return self._violation(f"more than {self._request.max_tokens} tokens came")
        self._deliver()
        if ending:
            if self.ending not in _FINAL:
                self.ending = ending
            self.wake()

    def lose(self, error: BatonError) -> None:
        """Fails the running attempt: its worker, or the sequence there, is lost. The first error counts."""
        self.attempt_error = self.attempt_error or error
        self.wake()

    def fail(self, error: BatonError) -> None:
        """Fails the request: another attempt would not help."""
        self.error = error
        self.wake()

    def end(self, finish: Finish) -> None:
        """Delivers the rest of the text, the usage and the trace."""
        rest = self._text.finish()
        self._timeline.mark(Stage.STAGE_ENDED)
        self._outbox.end(rest, finish, self.usage, self._timeline.trace(self.attempt))

    def finish(self) -> Finish | None:
        """The way the output has ended, or None: the last token may arrive without the report that it is the
        last."""
        if not self.prompt_complete:
            return None
        if self.stopped or (self.emitted and self.emitted[-1] in self._request.stop_token_ids):
            return Finish.STOP
        return Finish.LENGTH if len(self.emitted) >= self._request.max_tokens else None

    def wake(self) -> None:
        """Makes the request's task look again."""
        self._changed.set()

    async def changed(self) -> None:
        """Waits for the next report that needs a decision; the caller's deadline applies."""
        await self._changed.wait()
        self._changed.clear()

    def _deliver(self) -> None:
        """Puts new tokens into the outbox, up to the one that completes a stop string. The prompt's logprobs
        come first, though decode's stream may overtake prefill's."""
        if not self.prompt_complete:
            return
        text, undelivered, delivered = self._text, self._undelivered, 0
        try:
            if not self._timeline.has_reached(_DECODING):
                self._mark_progress()
            while undelivered and not text.stopped:
                offset = text.length
                token_id, logprobs = undelivered.popleft()
                self._outbox.put(token_id, text.push(token_id), offset, logprobs)
                delivered += 1
            if delivered:
                self._observations.delivered(delivered, self._timeline.delivered())
        except Exception as error:  # an internal error fails this request, not the stream that reports
            self.fail(internal_error(self._request.id, error))
        if self.stopped:
            self.wake()

    def _mark_progress(self) -> None:
        for reached, stage in (
            (bool(self.emitted), Stage.STAGE_FIRST_TOKEN),
            (self.decode_started, Stage.STAGE_HANDED_OFF),
            (self.decoding, Stage.STAGE_DECODING),
        ):
            if reached:
                self._timeline.mark(stage)

    def _violation(self, message: str) -> None:
        """Fails the request because a worker broke the protocol."""
        self.fail(BatonError(ErrorKind.INTERNAL, f"attempt {self.attempt}: {message}"))
