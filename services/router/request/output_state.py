"""What the router knows of a running request's output: emitted ids, and how the attempt fares.

Two streams report to it, prefill's and decode's; both say the number of each token, so what was
heard twice is dropped and what is missing is noticed. Only the attempt that runs is listened to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind
from baton.v1.types_pb2 import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Ids

    from baton.v1.decode_pb2 import SequenceOutput
    from baton.v1.prefill_pb2 import FirstToken, PromptLogprobs
    from baton.v1.types_pb2 import Logprobs
    from services.router.request.request import Request

# What a later word does not change.
_FINAL = (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)


class Sequence:
    """Written by stream readers, never blocking them. `on_tokens` is called within each report of tokens;
    the request's own task is woken only where there is something to judge.

    `emitted` is bounded by the request's max_tokens: a longer output is an error of the worker.
    """

    def __init__(self, request: Request) -> None:
        self._max_tokens = request.max_tokens
        self._with_logprobs = request.wants_logprobs
        # How many logprobs of the prompt are due: every token but the first has some.
        self._prompt_due = len(request.prompt_ids) - 1 if request.wants_prompt_logprobs else 0
        self._changed = asyncio.Event()
        self.on_tokens: Callable[[], None] = lambda: None
        self.emitted: list[int] = []
        # Where asked for: one a token of `emitted` that was not shown yet, and of the prompt from its second
        # token on. Serialised: a message would keep all of the response alive that it came in.
        self.logprobs: deque[bytes] = deque()
        self._prompt_logprobs: list[bytes] = []
        self._prompt_known = 0
        # Tokens of the prompt whose KV the first attempt that told a token had found; None before that.
        self.cached_tokens: int | None = None
        self._prompt_length = len(request.prompt_ids)
        self.begin(0)

    @property
    def prompt_told(self) -> bool:
        """Whether nothing is due of the prompt's logprobs any more."""
        return self._prompt_known == self._prompt_due

    def take_prompt_logprobs(self) -> list[bytes]:
        """The prompt's logprobs, which are held by the caller from now on."""
        taken, self._prompt_logprobs = self._prompt_logprobs, []
        return taken

    def begin(self, attempt: int) -> None:
        """From now on listens to this attempt; what earlier ones emitted stays, unless the prompt has to
        be run for its logprobs again: nothing was shown yet."""
        self.attempt = attempt
        if not self.prompt_told:
            self.emitted.clear()
            self.logprobs.clear()
        # How this attempt ended, as its worker says; UNSPECIFIED while it runs.
        self.ending: FinishReason.ValueType = FinishReason.FINISH_REASON_UNSPECIFIED
        # A broken promise of a worker: the request fails.
        self.fault: BatonError | None = None
        # The attempt is gone; another may go on.
        self.lost: BatonError | None = None
        # Decode has spoken of this attempt, so its handoff was committed.
        self.followed = False
        # Decode itself has ended the attempt: nothing is left there to cancel.
        self.ended_by_decode = False
        # Decode has said something prefill had not.
        self.decoding = False
        # Decode has promised this attempt a slot, and must know it from now on.
        self.reserved = False

    def accept_first(self, attempt: int, first: FirstToken) -> None:
        """`accept` for prefill's token."""
        if attempt == self.attempt and not self.prompt_told:
            return self._fail("a token came before all of the prompt's logprobs")
        if attempt == self.attempt and first.number == 0:
            self.cached_tokens = min(first.cached_tokens, self._prompt_length)
        logprobs = (first.logprobs,) if first.HasField("logprobs") else ()
        self.accept(attempt, first.number, (first.token_id,), first.finish_reason, logprobs)

    def accept_prompt(self, attempt: int, run: PromptLogprobs) -> None:
        """Takes logprobs of the prompt, in order; drops what an earlier attempt told already."""
        if attempt != self.attempt or self.fault is not None:
            return
        known = self._prompt_known
        # The first token has none, so the place of a position is one less.
        first = run.first_position - 1
        if not 0 <= first <= known:
            return self._fail(f"the prompt's logprobs {known} to {first - 1} never came")
        new = [one.SerializeToString() for one in run.logprobs[known - first :]]
        self._prompt_logprobs += new
        self._prompt_known += len(new)
        if self._prompt_known > self._prompt_due:
            return self._fail(f"more than {self._prompt_due} logprobs of the prompt came")
        if self.prompt_told and self.emitted:
            self.on_tokens()
        self.wake()

    def accept(
        self,
        attempt: int,
        first_number: int,
        token_ids: Ids[int],
        ending: FinishReason.ValueType,
        logprobs: Ids[Logprobs] = (),
    ) -> None:
        """Takes numbered tokens; drops what is known, faults on a gap or a contradiction."""
        if attempt != self.attempt or self.fault is not None:
            return
        known = len(self.emitted)
        if first_number > known:
            self._fail(f"tokens {known} to {first_number - 1} never came")
            return
        repeated = min(known - first_number, len(token_ids))
        if repeated and self.emitted[first_number : first_number + repeated] != list(token_ids[:repeated]):
            self._fail(f"token {first_number} came twice and differs")
            return
        if self._with_logprobs:
            if len(logprobs) != len(token_ids):
                self._fail(f"{len(token_ids)} tokens came with {len(logprobs)} logprobs")
                return
            self.logprobs.extend(one.SerializeToString() for one in logprobs[repeated:])
        self.emitted.extend(token_ids[repeated:])
        if len(self.emitted) > self._max_tokens:
            self._fail(f"more than {self._max_tokens} tokens came")
            return
        self.on_tokens()
        if ending:
            if self.ending not in _FINAL:
                self.ending = ending
            self.wake()

    def accept_decoded(self, output: SequenceOutput) -> None:
        """`accept` for what decode's stream says."""
        attempt, ids, ending = output.attempt.number, output.token_ids, output.finish_reason
        if attempt == self.attempt:
            # A reservation that ended unused says so without a token.
            self.followed |= bool(ids)
            self.ended_by_decode |= bool(ending)
            self.decoding |= output.first_number + len(ids) > len(self.emitted)
        self.accept(attempt, output.first_number, ids, ending, output.logprobs)

    def lose(self, error: BatonError) -> None:
        """The worker that held the running attempt is gone."""
        self.lost = self.lost or error
        self.wake()

    def fail(self, error: BatonError) -> None:
        """The request cannot go on, whoever tries."""
        self.fault = error
        self.wake()

    def wake(self) -> None:
        """Lets the request's task look again."""
        self._changed.set()

    async def changed(self) -> None:
        """Waits for the next report; the caller's deadline applies."""
        await self._changed.wait()
        self._changed.clear()

    def _fail(self, message: str) -> None:
        self.fail(BatonError(ErrorKind.INTERNAL, f"attempt {self.attempt}: {message}"))
