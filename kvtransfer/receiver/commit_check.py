"""What a receiver asks of a record and of a commit before it tells anybody."""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.frames import Commit, Record
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.inbound_transfer import Incoming


class Paid(NamedTuple):
    """A record that came ahead, and the ticket of ours in it."""

    record: CommitRecord
    body: TicketBody

    @property
    def described(self) -> bool:
        """Whether the record is all but what the last step finds; else it has the ticket alone."""
        return self.record.prompt_length > 0


def check_record(frame: Record, signer: TicketSigner, incarnation: bytes) -> Paid:
    """A record that pays with our own ticket for this transfer; else BatonError."""
    record = _parsed(frame.record)
    body = signer.verify(Ticket(body=record.ticket_body, signature=record.ticket_signature))
    if body.transfer_id != frame.transfer or body.issuer.incarnation != incarnation:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another transfer")
    if record.attempt != body.attempt:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another attempt")
    return Paid(record, body)


def check_commit(commit: Commit, incoming: Incoming) -> CommitRecord:
    """The whole record, if its ticket came ahead and nothing is missing; else BatonError. Where the rest came
    ahead too, only what the last step found is taken."""
    if incoming.paid is None:
        raise BatonError(ErrorKind.FORBIDDEN, "no ticket came before the commit")
    found, body = _parsed(commit.record), incoming.paid.body
    if incoming.paid.described:
        record = incoming.paid.record
        complete(record, found)
        record.block_counts[:] = found.block_counts
    elif found.attempt != body.attempt:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another attempt")
    else:
        record = found
    incoming.compare(record.block_counts, body)
    if incoming.missing_pieces:
        # Such as one whose transfer was misread on the way: another attempt may be luckier.
        raise BatonError(ErrorKind.UNAVAILABLE, f"{incoming.missing_pieces} pieces never arrived")
    return record


def complete(record: CommitRecord, found: CommitRecord) -> None:
    """A record that was said at the beginning has what the last step found, and nothing else of it."""
    record.first_token_id, record.first_number = found.first_token_id, found.first_number
    if found.HasField("first_logprobs"):
        record.first_logprobs.CopyFrom(found.first_logprobs)


def _parsed(record: bytes) -> CommitRecord:
    try:
        return CommitRecord.FromString(record)
    except DecodeError as error:
        raise BatonError(ErrorKind.INTERNAL, "the commit record cannot be read") from error
