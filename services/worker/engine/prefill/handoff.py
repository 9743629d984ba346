"""The two ways a prefilled sequence reaches its slot, behind three verbs: push, commit, withdraw.

Over a link that is `kvtransfer.sender.sender.Transfer`. Within a worker of role both it is `LocalHandoff`:
prefill has written into the reserved blocks themselves, so nothing is pushed and the commit admits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.device.stream import Event
from baton.v1.decode_pb2 import Ticket
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.receiver.inbound_transfer import add_first_token
from services.worker.engine.decode.reservations import DecodeSide


class Handoff(Protocol):
    """One sequence on its way."""

    def push(self, group: int, first: int, blocks: Sequence[int], after: Event | None = None) -> None:
        """Blocks `first` and following of the sequence are complete, now or at that moment of the step that
        completes them."""

    def commit(self, record: CommitRecord) -> None:
        """All blocks are pushed. `record`: what the last step found, behind what was said at the beginning.
        The acknowledgement comes later, over a link."""

    def withdraw(self, reason: WithdrawReason) -> None:
        """There will be no commit."""


class LocalHandoff:
    """The blocks change owner where they are."""

    def __init__(self, decode: DecodeSide, transfer_id: int, ticket: Ticket, record: CommitRecord) -> None:
        """`record`: all but what the last step finds, as a transfer is described."""
        self._decode = decode
        self._transfer_id = transfer_id
        self._record = record
        record.ticket_body, record.ticket_signature = ticket.body, ticket.signature

    def push(self, group: int, first: int, blocks: Sequence[int], after: Event | None = None) -> None:
        """Nothing to do: the blocks are already the ticket's."""

    def commit(self, record: CommitRecord) -> None:
        """Raises BatonError where the ticket has ended; else the sequence is admitted when this returns."""
        add_first_token(self._record, record)
        self._decode.commit_local(self._transfer_id, self._record)

    def withdraw(self, reason: WithdrawReason) -> None:
        self._decode.withdrawn(self._transfer_id)
