"""The Prefill calls of an engine and the handoffs they end in.

    start ─▶ queued ─▶ chunk ─▶ … ─▶ last chunk ─▶ first token ─▶ commit ─▶ acknowledged ─▶ ended
                         └─ its finished blocks are pushed while the next chunk computes

A sequence owns its blocks until its job ends; a transfer pins those that it still has to read. A ticket that
follows the prompt may arrive at any time: pushes and the commit wait for it. A request for no tokens has no
ticket: its prompt is computed for its logprobs alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.stream import TimedEvent
from baton.engine.memory.blocks import BlockTables
from baton.engine.plan.prefill_scheduler import PrefillScheduler
from baton.engine.sequence import Sequence
from baton.v1.decode_pb2 import TicketBody
from baton.v1.engine_pb2 import EngineEvent, PrefillEndedEvent
from baton.v1.prefill_pb2 import FirstToken, PrefillRequest, ProvideTicketRequest
from baton.v1.types_pb2 import Attempt, Sampling
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.sender.events import Acknowledged, Failed, SenderEvent
from kvtransfer.sender.sender import Sender
from kvtransfer.sender.transfer import Transfer
from services.common.engine.attempt_key import AttemptKey
from services.worker.engine.decode.handoff_receiver import HandoffReceiver
from services.worker.engine.prefill.handoff import Handoff, LocalHandoff, early_record, final_record
from services.worker.engine.prefill.reply import PrefillReply
from services.worker.engine.prefill.request_check import RequestCheck
from services.worker.engine.startup.model_loader import LoadedModel

# The attempt of a canary generation: routers' request ids have 16 bytes.
_CANARY = Attempt(request_id=b"canary", number=1)
_CANARY_TOKENS = 8
# Errors by which a receiver refuses a transfer that is not as it expects.
_TRANSFER_REFUSALS = (ErrorKind.NOT_FOUND, ErrorKind.INVALID)


@dataclass(slots=True, eq=False)
class PrefillJob:
    """State of one Prefill call."""

    key: AttemptKey
    request: PrefillRequest
    sequence: Sequence
    reply: PrefillReply
    handoff: Handoff | None  # None where no token is sampled, and until the ticket has arrived
    pushed: list[int]  # blocks pushed so far, by cache group, those resident at decode included
    committed: bool = False  # from here on the receiver decides, within the link's deadline
    first: FirstToken | None = None
    # Monotonic clock: when its first step was begun, when its latest one was last seen running, and when its
    # first blocks were handed to a link.
    started_ns: int = 0
    computed_ns: int = 0
    shipped_ns: int = 0

    def ended(self) -> None:
        """Reports the end of the call."""
        self.reply.ended(
            PrefillEndedEvent(
                started_ns=self.started_ns, computed_ns=self.computed_ns, shipped_ns=self.shipped_ns
            )
        )


@dataclass(eq=False)
class PrefillJobs:
    """All Prefill calls of one engine. All calls come from the engine's loop.

    `local`: the decode side of the same engine, where its role is both; its tickets have the engine's
    `incarnation`.
    """

    model: LoadedModel
    scheduler: PrefillScheduler
    sender: Sender
    check: RequestCheck
    incarnation: bytes
    local: HandoffReceiver | None
    emit: Callable[[EngineEvent], None]
    _jobs: dict[AttemptKey, PrefillJob] = field(default_factory=dict, init=False)
    _by_sequence: dict[Sequence, PrefillJob] = field(default_factory=dict, init=False)
    _by_handoff: dict[Handoff, PrefillJob] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._jobs)

    def find(self, sequence: Sequence) -> PrefillJob | None:
        """The job of a sequence; None where it has ended."""
        return self._by_sequence.get(sequence)

    def owned_blocks(self) -> list[BlockTables]:
        """The block tables that sequences own, those borrowed from a reservation excepted."""
        sequences = self.scheduler.sequences
        return [s.blocks for s in sequences if s.blocks is not None and not s.borrowed]

    def start(self, command_id: int, request: PrefillRequest, first_token_mask: bytes = b"") -> None:
        """Queues a prompt. `first_token_mask`: see `EngineCommand`. Raises BatonError: INVALID, CONFLICT or
        OVERLOADED."""
        key = AttemptKey.of(request.attempt)
        if key in self._jobs:
            raise BatonError(ErrorKind.CONFLICT, "this attempt is being prefilled already")
        self._start(command_id, request, self.check.sequence_of(request, first_token_mask))

    def start_canary(self, command_id: int) -> None:
        """Queues the prompt of a canary generation, which looks up no cached prefix, leaves none, and is left
        out of the counts of prompts and tokens. Raises BatonError: CONFLICT where one runs, OVERLOADED."""
        length = min(_CANARY_TOKENS, self.model.max_context_tokens)
        vocab_size = self.model.config.vocab_size
        request = PrefillRequest(
            attempt=_CANARY,
            token_ids=[number % vocab_size for number in range(length)],
            prompt_length=length,
            sampling=Sampling(top_p=1),
        )
        if AttemptKey.of(_CANARY) in self._jobs:
            raise BatonError(ErrorKind.CONFLICT, "a canary generation is running already")
        sequence = self.check.sequence_of(request)
        sequence.hashes, sequence.canary = (), True
        self._start(command_id, request, sequence)

    def cancel_canary(self) -> None:
        """Stops the canary generation where one runs; its command fails with CONFLICT."""
        self.cancel(AttemptKey.of(_CANARY))

    def _start(self, command_id: int, request: PrefillRequest, sequence: Sequence) -> None:
        key = AttemptKey.of(request.attempt)
        handoff = self._queue(key, request, sequence)
        pushed = [0] * len(self.model.layout.groups)
        job = PrefillJob(key, request, sequence, PrefillReply(self.emit, command_id), handoff, pushed)
        self._jobs[key] = self._by_sequence[sequence] = job
        if handoff is not None:
            self._attach(job, handoff)

    def provide_ticket(self, request: ProvideTicketRequest) -> None:
        """Begins the handoff of a prefill that waits for its ticket, and catches up with what is computed.

        Raises BatonError: NOT_FOUND where no prefill waits; CONFLICT or INVALID, which fails the prefill too.
        """
        job = self._jobs.get(AttemptKey.of(request.attempt))
        if job is None or not job.request.ticket_follows or job.handoff is not None:
            raise BatonError(ErrorKind.NOT_FOUND, "no prefill of this attempt waits for a ticket")
        job.request.ticket.CopyFrom(request.ticket)
        try:
            transfer = self.begin_transfer(job.request, self.check.ticket_of(job.request, job.sequence))
        except BatonError as error:
            self.fail(job, error)
            raise
        self._attach(job, transfer)
        if job.sequence.blocks is not None:  # it has started
            self.push(job, job.sequence.computed)
        self.finish_prompt(job)

    def cancel(self, key: AttemptKey) -> None:
        """Stops a prefill between two chunks and fails its call with CONFLICT; idempotent.

        Once committed, a sequence is the receiver's, and is cancelled there.
        """
        job = self._jobs.get(key)
        if job is not None and not job.committed:
            self.fail(job, BatonError(ErrorKind.CONFLICT, "the attempt was cancelled"))
            if job.handoff is not None:
                job.handoff.withdraw(WithdrawReason.ABORTED)

    def push(self, job: PrefillJob, computed: int, after: TimedEvent | None = None) -> None:
        """Pushes the blocks that are complete once `computed` tokens are, now or when the device reaches
        `after`; at the prompt's end the partly filled one too."""
        handoff, sequence = job.handoff, job.sequence
        if handoff is None:
            return
        assert sequence.blocks is not None
        for group, layout in enumerate(self.model.layout.groups):
            full = computed // layout.block_tokens
            until = len(sequence.blocks[group]) if computed == sequence.length else full
            first = job.pushed[group]
            if until <= first:
                continue
            blocks = sequence.blocks[group][first:until]
            if not sequence.borrowed:
                for block in blocks:  # until the transfer has read it
                    self.model.pools.pools[group].pin(block)
            handoff.push(group, first, blocks, after)
            job.shipped_ns = job.shipped_ns or time.monotonic_ns()
            job.pushed[group] = until

    def finish_prompt(self, job: PrefillJob) -> None:
        """Commits the handoff of a prompt whose first token is sampled, or withdraws it where that token ends
        the output. Does nothing before the first token, before the ticket, or a second time."""
        if job.first is None or job.handoff is None or job.committed:
            return
        if job.first.finish_reason:
            self.end(job)
            job.handoff.withdraw(WithdrawReason.FINISHED)
            job.ended()
        elif self.commit(job) and isinstance(job.handoff, LocalHandoff):
            self._handed_off(job, "local", 0, time.monotonic_ns())

    def commit(self, job: PrefillJob) -> bool:
        """Commits behind the prompt's last block a sequence that continues; False where that fails."""
        assert job.first is not None
        assert job.handoff is not None
        job.committed = True
        try:
            job.handoff.commit(final_record(job.first))
        except BatonError as error:
            self.fail(job, error)
            job.handoff.withdraw(WithdrawReason.ABORTED)
            return False
        return True

    def handle(self, events: list[SenderEvent]) -> None:
        """Ends the jobs whose transfers have ended."""
        for event in events:
            job = self._by_handoff.get(event.transfer)
            if job is None:
                continue  # it was cancelled
            match event:
                case Acknowledged(transfer, transport, at_ns):
                    self._handed_off(job, transport, transfer.bytes_shipped, at_ns)
                case Failed(_, error):
                    self.fail(job, _retryable(error))

    def fail(self, job: PrefillJob, error: BatonError) -> None:
        """Ends a job and fails its call."""
        self.end(job)
        job.reply.failed(error)

    def end(self, job: PrefillJob) -> None:
        """Removes a job and frees its blocks; those that a transfer still reads stay pinned."""
        del self._jobs[job.key], self._by_sequence[job.sequence]
        if job.handoff is not None:
            del self._by_handoff[job.handoff]
        self.scheduler.remove(job.sequence)

    def _queue(self, key: AttemptKey, request: PrefillRequest, sequence: Sequence) -> Handoff | None:
        """Adds the sequence to the scheduler and begins its handoff where it has a ticket."""
        if not sequence.draws or request.ticket_follows:
            self.scheduler.add(sequence)
            return None
        body = self.check.ticket_of(request, sequence)
        if self.local is not None and body.issuer.incarnation == self.incarnation:
            handoff = LocalHandoff(self.local, request, body, sequence, partial(self.cancel, key))
            self.scheduler.add(sequence)
            return handoff
        self.scheduler.add(sequence)
        try:
            return self.begin_transfer(request, body)
        except BatonError:
            self.scheduler.remove(sequence)
            raise

    def begin_transfer(self, request: PrefillRequest, body: TicketBody) -> Transfer:
        """Opens the transfer of a request to the worker whose ticket it has, and sends its early record."""
        if not body.endpoints:
            raise BatonError(ErrorKind.CONFLICT, "the ticket is for its issuer's own prefill")
        transfer = self.sender.begin(request.ticket, body)
        try:
            transfer.send_metadata(early_record(request))
        except BatonError:
            transfer.withdraw(WithdrawReason.ABORTED)
            raise
        return transfer

    def _attach(self, job: PrefillJob, handoff: Handoff) -> None:
        job.handoff = handoff
        self._by_handoff[handoff] = job
        if isinstance(handoff, Transfer):
            job.pushed[:] = handoff.resident_counts

    def _handed_off(self, job: PrefillJob, transport: str, bytes_shipped: int, at_ns: int) -> None:
        self.end(job)
        job.reply.handed_off(transport, bytes_shipped, max(0, at_ns - job.computed_ns))
        job.ended()


def _retryable(error: BatonError) -> BatonError:
    """A failed transfer as its request's error. A receiver's refusal is never the client's fault: the two
    workers disagree, and another pair, or the next attempt, may not."""
    if error.kind in _TRANSFER_REFUSALS:
        message = f"the handoff failed: {error.message}"
        return BatonError(ErrorKind.UNAVAILABLE, message, cause=error.cause)
    return error
