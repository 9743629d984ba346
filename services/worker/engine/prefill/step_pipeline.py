"""Prefill steps overlapped with the transfers of what they compute.

On a GPU the next step is begun before the current one ends, and links between devices read blocks as soon as
the step that computes them has ended. So before the end of a step its blocks are announced to the links, at
its end they are shipped, and only then is the rest done: accounting, replies, the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.device.streams.stream import TimedEvent
from baton.engine.executor.prefill_steps import PrefillSteps
from baton.engine.executor.step_handle import ChunkResult, StepHandle
from baton.engine.sequence import Sequence
from baton.v1.prefill_pb2 import FirstToken
from baton.v1.types_pb2 import FinishReason
from kvtransfer.sender.events import SenderEvent
from kvtransfer.sender.sender import Sender
from kvtransfer.sender.transfer import Transfer
from services.common.engine.logprobs import logprobs_message
from services.worker.engine.prefill.jobs import PrefillJob, PrefillJobs

# How long before the expected end of a step its blocks are announced. The links' device queues wait for that
# end from then on, and everything else on them waits behind.
_ANNOUNCE_S = 0.001
# The longest that an iteration waits for that end, and how often the links are polled meanwhile.
_WAIT_S, _POLL_S = 0.001, 0.0001


@dataclass(eq=False)
class PrefillPipeline:
    """Sends what the prefill steps of one engine compute. All calls come from the engine's loop.

    `device_pieces`: pieces to ship before the next step is begun, where a device moves them; 0 where the host
    does.
    """

    jobs: PrefillJobs
    steps: PrefillSteps
    sender: Sender
    device_pieces: int
    # The end of the step whose blocks were announced last; and the same, while it is waited for.
    _announced: TimedEvent | None = field(default=None, init=False)
    _awaited: TimedEvent | None = field(default=None, init=False)

    def step(self, launch: Callable[[], StepHandle | None]) -> bool:
        """Pushes completed blocks and sends first tokens, before and after `launch`, which launches the next
        chunks where they are due; False where it has launched none."""
        self._await_end()
        if self._end_steps() and self.device_pieces:  # before the next step, for which no reply waits
            self.poll(self.device_pieces)
        if self.device_pieces:
            self._announce()
        launched = launch()
        self._end_steps()
        return launched is not None

    def poll(self, max_pieces: int) -> bool:
        """Does bounded work on the links; returns True if a handoff ended."""
        events = self.sender.poll(max_pieces)
        self.jobs.handle(events)
        return bool(events)

    def _end_steps(self) -> bool:
        """Ships the blocks of all steps that have ended, then replies; False where none has ended."""
        results = self.steps.ended()
        events = self._ship(results)
        self.steps.finalize()
        self._reply(results)
        self.jobs.handle(events)  # after the replies, which come before a handoff's end
        return bool(results)

    def _announce(self) -> None:
        """Pushes the blocks of the step that is about to end: the links' devices wait for that end by
        themselves, so that no host work is left for then."""
        ending = self.steps.ending(_ANNOUNCE_S)
        if ending is None or ending[1] is self._announced or ending[1].query():
            return
        chunks, self._announced = ending
        for chunk in chunks:
            job = self.jobs.find(chunk.sequence)
            if job is not None and isinstance(job.handoff, Transfer):
                self.jobs.push(job, chunk.start + chunk.count, self._announced)
                self._awaited = self._announced
        self.poll(self.device_pieces)

    def _await_end(self) -> None:
        """Waits for the end of a step whose blocks are announced: an iteration of the engine's loop takes
        longer than what is left of the step, and commits need its first tokens. Polling keeps the links'
        devices from going idle."""
        until = time.monotonic() + _WAIT_S
        while self._awaited is not None and time.monotonic() < until:
            if self._awaited.query() or self.steps.await_end(_POLL_S):
                self._awaited = None
            else:
                self.poll(self.device_pieces)

    def _ship(self, results: list[ChunkResult]) -> list[SenderEvent]:
        """Pushes completed blocks. Where a device moves them, they and their commits are sent at once, before
        any reply; returns the events of that poll."""
        for job, result in self._jobs_of(results):
            job.started_ns = job.started_ns or result.begun_ns
            job.computed_ns = self.steps.ended_after_ns
            if result.token is not None:
                job.first = _first_token(job.sequence, result)
            self.jobs.push(job, result.chunk.start + result.chunk.count)
            if self.device_pieces and isinstance(job.handoff, Transfer) and _continues(job):
                self.jobs.commit(job)
        return self.sender.poll(self.device_pieces) if results and self.device_pieces else []

    def _reply(self, results: list[ChunkResult]) -> None:
        for job, result in self._jobs_of(results):
            job.reply.prompt_logprobs(result.prompt_logprobs, last=result.chunk.is_last)
            if job.first is not None:
                job.reply.first_token(job.first)
                self.jobs.finish_prompt(job)
            elif result.chunk.is_last:
                self.jobs.end(job)
                job.ended()

    def _jobs_of(self, results: list[ChunkResult]) -> Iterator[tuple[PrefillJob, ChunkResult]]:
        """The jobs that have not ended, with their results."""
        for result in results:
            job = self.jobs.find(result.chunk.sequence)
            if job is not None:
                yield job, result


def _continues(job: PrefillJob) -> bool:
    """Returns whether the first token is sampled and does not end the output."""
    return job.first is not None and not job.first.finish_reason


def _first_token(sequence: Sequence, result: ChunkResult) -> FirstToken:
    assert result.token is not None
    return FirstToken(
        number=sequence.first_number,
        token_id=result.token,
        finish_reason=FinishReason.ValueType(sequence.finish_of(result.token).value),
        logprobs=None if result.logprobs is None else logprobs_message(result.logprobs),
        cached_tokens=sequence.cached,
    )
