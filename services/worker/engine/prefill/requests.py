"""What an engine process does as the giving end of handoffs: run prompts, push blocks, commit.

    Prefill ─▶ queued ─▶ chunk ─▶ … ─▶ last chunk ─▶ first token ─▶ commit ─▶ acknowledged ─▶ ended
                           └─ its finished blocks are pushed while the next chunk computes

A sequence's blocks are its own until `_end`; a transfer pins those that it still has to read. A ticket that
follows may come at any time: what is due to its handoff waits for it, pushes and the commit alike. A request
for no tokens has no ticket: its prompt is run for its logprobs, and that is all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from baton.device.lane import Moment
from baton.engine.memory.blocks import BlockTables
from baton.engine.prefill.loop import ChunkResult, PrefillLoop
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.rings.logprob_records import Logprobs
from baton.engine.sequence import Sequence
from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import TicketBody
from baton.v1.engine_pb2 import EngineEvent, FailedEvent, PrefillEndedEvent
from baton.v1.prefill_pb2 import (
    FirstToken,
    GiveTicketRequest,
    HandedOff,
    PrefillRequest,
    PrefillResponse,
    PromptLogprobs,
)
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import FinishReason, WorkerIdentity
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.sender.events import Acknowledged, Failed, SenderEvent
from kvtransfer.sender.sender import Sender
from kvtransfer.sender.transfer import Transfer
from services.common.engine_channel import PROMPT_LOGPROBS_A_MESSAGE
from services.common.logprobs import logprobs_message
from services.worker.engine.decode.reservations import DecodeSide
from services.worker.engine.decode.ticket_book import AttemptKey
from services.worker.engine.prefill.handoff import Handoff, LocalHandoff
from services.worker.engine.prefill.request_check import Intake
from services.worker.engine.startup.model_loader import LoadedModel

# Blocks are pushed so long before the step that computes them should end. Links' wires stand still from then
# on, and what else there is for them waits as long.
_ANNOUNCED_S = 0.001
# How long a turn waits for that step's end at most, and how often links are kept awake meanwhile.
_AWAITED_S, _AWAKE_S = 0.001, 0.0001

# Errors by which a receiver says that a transfer, and not the client's request, is not as it expects.
_DISAGREEMENTS = (ErrorKind.NOT_FOUND, ErrorKind.INVALID)


@dataclass(slots=True, eq=False)
class Job:
    """One Prefill call."""

    command_id: int
    key: AttemptKey
    request: PrefillRequest
    sequence: Sequence
    handoff: Handoff | None  # none where no token is drawn, and until the ticket is here
    pushed: list[int]  # blocks pushed so far, by cache group; those that decode held already among them
    committed: bool = False  # from here on the receiver decides, within the link's deadline
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # not told yet
    prompt_told: int = 1  # index in the prompt of the first of them; that of token 0 is not defined
    first: FirstToken | None = None  # drawn, and told to the router within the turn
    computed_ns: int = 0  # when the last step was last seen to be under way


class PrefillSide:
    """Prompts and the handoffs they end in. All calls come from the engine's loop."""

    def __init__(
        self,
        model: LoadedModel,
        loop: PrefillLoop,
        identity: WorkerIdentity,
        sender: Sender,
        local: DecodeSide | None,
        emit: Callable[[EngineEvent], None],
        prefixes: PrefixCache | None = None,
        *,
        names_agree: bool = True,
        ships_first: int = 0,
    ) -> None:
        """`names_agree`: as `Intake`'s. `ships_first`: so many pieces of what a step has finished go before
        the next is begun: a GPU moves them meanwhile."""
        self._intake = Intake(model, prefixes, names_agree=names_agree)
        self._ships_first = ships_first
        self._model = model
        self._loop = loop
        self._identity = identity
        self._sender = sender
        self._local = local
        self._emit = emit
        self._jobs: dict[AttemptKey, Job] = {}
        self._by_sequence: dict[Sequence, Job] = {}
        self._by_transfer: dict[Handoff, Job] = {}
        # The end of the step whose blocks were pushed last before it; the same, until it has come.
        self._announced: Moment | None = None
        self._awaited: Moment | None = None

    @property
    def loop(self) -> PrefillLoop:
        return self._loop

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    def owned_blocks(self) -> list[BlockTables]:
        """Block tables that sequences hold, those lent by a reservation excepted."""
        sequences = self._loop.scheduler.sequences
        return [s.blocks for s in sequences if s.blocks is not None and not s.borrowed]

    def start(self, command_id: int, request: PrefillRequest) -> None:
        """Queues a prompt. Raises BatonError: INVALID, CONFLICT or OVERLOADED."""
        key = AttemptKey.of(request.attempt)
        if key in self._jobs:
            raise BatonError(ErrorKind.CONFLICT, "this attempt is being prefilled already")
        sequence = self._intake.sequence_of(request)
        handoff = self._queue(key, request, sequence)
        job = Job(command_id, key, request, sequence, handoff, [0] * len(self._model.layout.groups))
        if isinstance(handoff, Transfer):
            job.pushed[:] = handoff.resident_counts
        self._jobs[key] = self._by_sequence[sequence] = job
        if handoff is not None:
            self._by_transfer[handoff] = job

    def give_ticket(self, request: GiveTicketRequest) -> None:
        """Begins the handoff of a prefill that waits for its ticket, and makes up what it is behind.

        Raises BatonError: NOT_FOUND, or CONFLICT (or INVALID), which fails the prefill too.
        """
        job = self._jobs.get(AttemptKey.of(request.attempt))
        if job is None or not job.request.ticket_follows or job.handoff is not None:
            raise BatonError(ErrorKind.NOT_FOUND, "no prefill of this attempt waits for a ticket")
        job.request.ticket.CopyFrom(request.ticket)
        try:
            transfer = self._begin(job.request, self._intake.ticket_of(job.request, job.sequence))
        except BatonError as error:
            self._fail(job, error)
            raise
        job.handoff, job.pushed[:] = transfer, transfer.resident_counts
        self._by_transfer[transfer] = job
        if job.sequence.blocks is not None:  # it has begun
            self._push(job, transfer, job.sequence.computed)
        if job.first is not None:
            self._settle(job, transfer, job.first)

    def _queue(self, key: AttemptKey, request: PrefillRequest, sequence: Sequence) -> Handoff | None:
        if not sequence.draws or request.ticket_follows:
            self._loop.scheduler.add(sequence)
            return None
        body = self._intake.ticket_of(request, sequence)
        if self._local is not None and body.issuer.incarnation == self._identity.incarnation:
            sequence.blocks = self._local.blocks_of(body.transfer_id, key, sequence.length)
            sequence.borrowed = True
            sequence.lend = partial(self._local.lend, body.transfer_id, token_count=sequence.length)
            self._loop.scheduler.add(sequence)
            return LocalHandoff(self._local, body.transfer_id, request.ticket, _described(request))
        self._loop.scheduler.add(sequence)
        try:
            return self._begin(request, body)
        except BatonError:
            self._loop.scheduler.remove(sequence)
            raise

    def _begin(self, request: PrefillRequest, body: TicketBody) -> Transfer:
        if not body.transfer_address:
            raise BatonError(ErrorKind.CONFLICT, "the ticket is for its issuer's own prefill")
        transfer = self._sender.begin(request.ticket, body)
        try:
            transfer.describe(_described(request))
        except BatonError:
            transfer.withdraw(WithdrawReason.ABORTED)
            raise
        return transfer

    def cancel(self, key: AttemptKey) -> None:
        """Stops a prefill between two chunks, and its call with CONFLICT; idempotent.

        What has been committed is the receiver's: whoever wants it stopped tells the receiver.
        """
        job = self._jobs.get(key)
        if job is not None and not job.committed:
            self._fail(job, BatonError(ErrorKind.CONFLICT, "the attempt was cancelled"))
            if job.handoff is not None:
                job.handoff.withdraw(WithdrawReason.ABORTED)

    def step(self) -> bool:
        """Begins the next chunks where they are due, pushes what others have finished, tells first tokens;
        False where none were begun."""
        self._await_end()
        if self._end_steps() and self._ships_first:  # nobody waits for a token until the next step is said
            self.poll(self._ships_first)
        if self._ships_first:
            self._announce()
        begun = self._loop.begin()
        self._end_steps()
        return begun

    def _end_steps(self) -> bool:
        """Ships and tells the results of all that have ended; False where none has."""
        finished = self._loop.ended()
        heard = self._ship(finished)
        self._loop.settle()
        self._take(finished)
        self._handle(heard)  # a handoff may have ended by now: its job has told all that it had to tell
        return bool(finished)

    def _announce(self) -> None:
        """What the step that is about to end completes is pushed before it has: links' devices wait for that
        moment themselves, and nothing that hosts have to say of it is left for then."""
        ending = self._loop.ending(_ANNOUNCED_S)
        if ending is None or ending[1] is self._announced or ending[1].ended():
            return
        chunks, self._announced = ending
        for chunk in chunks:
            job = self._by_sequence.get(chunk.sequence)
            if job is not None and isinstance(job.handoff, Transfer):
                self._push(job, job.handoff, chunk.start + chunk.count, self._announced)
                self._awaited = self._announced
        self.poll(self._ships_first)

    def _await_end(self) -> None:
        """Of a step whose blocks are announced: a turn of the loop takes longer than what is left of it, and
        its first tokens go with the commits."""
        until = time.monotonic() + _AWAITED_S
        while self._awaited is not None and time.monotonic() < until:
            if self._awaited.ended() or self._loop.await_end(_AWAKE_S):
                self._awaited = None
            else:
                self.poll(self._ships_first)  # which keeps the links awake

    def _ship(self, results: list[ChunkResult]) -> list[SenderEvent]:
        """Pushes what is finished; where a device moves it, it is on its way, and its commit behind it,
        before anything is told. What was heard meanwhile."""
        for job, result in self._jobs_of(results):
            job.computed_ns = self._loop.ended_after_ns
            if result.token is not None:
                job.first = _first_of(job.sequence, result)
            if job.handoff is None:
                continue
            self._push(job, job.handoff, result.chunk.start + result.chunk.count)
            ahead = self._ships_first and isinstance(job.handoff, Transfer)
            if ahead and job.first is not None and not job.first.finish_reason:
                self._commit(job, job.handoff, job.first)
        return self._sender.poll(self._ships_first) if results and self._ships_first else []

    def _jobs_of(self, results: list[ChunkResult]) -> Iterator[tuple[Job, ChunkResult]]:
        """But of those that another's result has ended meanwhile."""
        for result in results:
            job = self._by_sequence.get(result.chunk.sequence)
            if job is not None:
                yield job, result

    def _take(self, results: list[ChunkResult]) -> None:
        for job, result in self._jobs_of(results):
            self._tell_prompt(job, result)
            if job.first is not None:
                self._first_token(job, job.first)
            elif result.chunk.is_last:
                self._end(job)
                self._emit(EngineEvent(id=job.command_id, prefill_ended=PrefillEndedEvent()))

    def poll(self, max_pieces: int) -> bool:
        """Bounded link work; True where a handoff ended."""
        events = self._sender.poll(max_pieces)
        self._handle(events)
        return bool(events)

    def _handle(self, events: list[SenderEvent]) -> None:
        for event in events:
            job = self._by_transfer.get(event.transfer)
            if job is None:
                continue  # cancelled meanwhile
            match event:
                case Acknowledged(transfer, transport, at_ns):
                    self._handed_off(job, transport, transfer.bytes_shipped, at_ns)
                case Failed(_, error):
                    self._fail(job, _link_error(error))

    def _tell_prompt(self, job: Job, result: ChunkResult) -> None:
        """Tells the prompt's logprobs in messages of bounded size, all of them before the first token."""
        job.prompt_logprobs += result.prompt_logprobs
        while job.prompt_logprobs and (
            result.chunk.is_last or len(job.prompt_logprobs) >= PROMPT_LOGPROBS_A_MESSAGE
        ):
            part = job.prompt_logprobs[:PROMPT_LOGPROBS_A_MESSAGE]
            del job.prompt_logprobs[: len(part)]
            logprobs = [logprobs_message(one) for one in part]
            told = PromptLogprobs(first_position=job.prompt_told, logprobs=logprobs)
            job.prompt_told += len(part)
            self._tell(job, PrefillResponse(prompt_logprobs=told))

    def _push(self, job: Job, handoff: Handoff, computed: int, after: Moment | None = None) -> None:
        """Hands over the blocks that are complete once so many tokens are computed, now or at that moment;
        after the last chunk, the partly filled one too."""
        sequence = job.sequence
        assert sequence.blocks is not None
        complete = computed == sequence.length
        for group, layout in enumerate(self._model.layout.groups):
            full = computed // layout.block_tokens
            until = len(sequence.blocks[group]) if complete else full
            first = job.pushed[group]
            if until <= first:
                continue
            blocks = sequence.blocks[group][first:until]
            if not sequence.borrowed:
                for block in blocks:  # until the transfer has read it
                    self._model.pools.pools[group].pin(block)
            handoff.push(group, first, blocks, after)
            job.pushed[group] = until

    def _first_token(self, job: Job, first: FirstToken) -> None:
        self._tell(job, PrefillResponse(first_token=first))
        if job.handoff is not None and not job.committed:
            self._settle(job, job.handoff, first)

    def _settle(self, job: Job, handoff: Handoff, first: FirstToken) -> None:
        """The prompt is whole and its blocks are pushed: commits, or gives the ticket back."""
        if first.finish_reason:
            self._end(job)
            handoff.withdraw(WithdrawReason.FINISHED)
            self._emit(EngineEvent(id=job.command_id, prefill_ended=PrefillEndedEvent()))
            return
        if self._commit(job, handoff, first) and isinstance(handoff, LocalHandoff):
            self._handed_off(job, "local", 0, time.monotonic_ns())

    def _commit(self, job: Job, handoff: Handoff, first: FirstToken) -> bool:
        """Behind the prompt's last block, of a sequence that goes on; False where that cannot be."""
        job.committed = True
        try:
            handoff.commit(_found(first))
        except BatonError as error:
            self._fail(job, error)
            handoff.withdraw(WithdrawReason.ABORTED)
            return False
        return True

    def _handed_off(self, job: Job, transport: str, bytes_shipped: int, at_ns: int) -> None:
        self._end(job)
        exposed_ns = max(0, at_ns - job.computed_ns)
        handed_off = HandedOff(transport=transport, bytes_shipped=bytes_shipped, exposed_ns=exposed_ns)
        self._tell(job, PrefillResponse(handed_off=handed_off))
        self._emit(EngineEvent(id=job.command_id, prefill_ended=PrefillEndedEvent()))

    def _fail(self, job: Job, error: BatonError) -> None:
        self._end(job)
        failed = FailedEvent(kind=error.kind.value, message=error.message)  # type: ignore[arg-type]
        self._emit(EngineEvent(id=job.command_id, failed=failed))

    def _tell(self, job: Job, response: PrefillResponse) -> None:
        self._emit(EngineEvent(id=job.command_id, prefill=response))

    def _end(self, job: Job) -> None:
        """Forgets a job and gives its blocks back; those a transfer still reads stay pinned."""
        del self._jobs[job.key], self._by_sequence[job.sequence]
        if job.handoff is not None:
            del self._by_transfer[job.handoff]
        self._loop.scheduler.remove(job.sequence)


def _link_error(error: BatonError) -> BatonError:
    """What a failed transfer means for its request: never that the client asked for something wrong. The two
    workers disagree, and with another pair, or at the next attempt, they may not."""
    if error.kind in _DISAGREEMENTS:
        return BatonError(ErrorKind.UNAVAILABLE, f"the handoff failed: {error.message}")
    return error


def _first_of(sequence: Sequence, result: ChunkResult) -> FirstToken:
    assert result.token is not None
    return FirstToken(
        number=sequence.first_number,
        token_id=result.token,
        finish_reason=FinishReason.ValueType(sequence.finish_of(result.token).value),
        logprobs=None if result.logprobs is None else logprobs_message(result.logprobs),
        cached_tokens=sequence.cached,
    )


def _described(request: PrefillRequest) -> CommitRecord:
    """What is known of the sequence before it is computed."""
    return CommitRecord(
        attempt=request.attempt,
        token_ids=request.token_ids,
        prompt_length=request.prompt_length,
        sampling=request.sampling,
        limits=request.limits,
    )


def _found(first: FirstToken) -> CommitRecord:
    """What its last step adds to that."""
    logprobs = first.logprobs if first.HasField("logprobs") else None
    return CommitRecord(first_token_id=first.token_id, first_number=first.number, first_logprobs=logprobs)
