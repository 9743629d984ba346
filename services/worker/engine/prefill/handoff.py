"""The two ways a prefilled sequence reaches its slot, behind one interface: push, commit, withdraw.

Over a link a handoff is a `kvtransfer.sender.transfer.Transfer`. Within a worker of role both it is a
`LocalHandoff`: prefill has written into the reserved blocks, so nothing is pushed and the commit admits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from baton.device.streams.stream import Event
from baton.engine.sequence import Sequence as PromptSequence
from baton.v1.decode_pb2 import TicketBody
from baton.v1.prefill_pb2 import FirstToken, PrefillRequest
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.commit_record import add_first_token
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.sender.transfer import Transfer
from services.common.engine.attempt_key import AttemptKey
from services.worker.engine.decode.handoff_receiver import HandoffReceiver


class LocalHandoff:
    """A handoff within one worker: the sequence computes into the reserved blocks, which then change
    owner."""

    def __init__(
        self,
        receiver: HandoffReceiver,
        request: PrefillRequest,
        body: TicketBody,
        sequence: PromptSequence,
        revoke: Callable[[], None],
    ) -> None:
        """Gives `sequence` the reserved blocks; `revoke` is called before they are freed. Raises
        BatonError(CONFLICT) where the ticket has ended."""
        self._receiver = receiver
        self._transfer_id = body.transfer_id
        self._record = early_record(request)
        self._record.ticket_body = request.ticket.body
        self._record.ticket_signature = request.ticket.signature
        reserved, key = receiver.reserved, AttemptKey.of(request.attempt)
        sequence.blocks = reserved.borrow(body.transfer_id, key, sequence.length, revoke)
        sequence.borrowed = True
        sequence.lend = partial(reserved.lend_cached, body.transfer_id, token_count=sequence.length)

    def push(self, group: int, first: int, blocks: Sequence[int], after: Event | None = None) -> None:
        """Does nothing: the blocks are the ticket's already."""

    def commit(self, record: CommitRecord) -> None:
        """Admits the sequence before it returns. Raises BatonError where the ticket has ended."""
        add_first_token(self._record, record)
        self._receiver.commit_local(self._transfer_id, self._record)

    def withdraw(self, reason: WithdrawReason) -> None:
        self._receiver.reserved.end_unused(self._transfer_id)


Handoff = Transfer | LocalHandoff
"""The transfer of one sequence to its slot."""


def early_record(request: PrefillRequest) -> CommitRecord:
    """Everything in a commit record that is known before the prompt is computed."""
    return CommitRecord(
        attempt=request.attempt,
        token_ids=request.token_ids,
        prompt_length=request.prompt_length,
        sampling=request.sampling,
        limits=request.limits,
    )


def final_record(first: FirstToken) -> CommitRecord:
    """Returns the commit record of a prompt's last step, with its first token."""
    logprobs = first.logprobs if first.HasField("logprobs") else None
    return CommitRecord(first_token_id=first.token_id, first_number=first.number, first_logprobs=logprobs)
