"""What a receiver asks of a commit before it tells anybody."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.frames import Commit
from kvtransfer.incoming import Incoming
from kvtransfer.ticket import TicketSigner


def check_commit(
    commit: Commit, incoming: Incoming, signer: TicketSigner, incarnation: bytes
) -> CommitRecord:
    """The record, if it pays with our own ticket and nothing is missing; else BatonError."""
    try:
        record = CommitRecord.FromString(commit.record)
    except DecodeError as error:
        raise BatonError(ErrorKind.INTERNAL, "the commit record cannot be read") from error
    body = signer.verify(Ticket(body=record.ticket_body, signature=record.ticket_signature))
    if body.transfer_id != commit.transfer or body.issuer.incarnation != incarnation:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another transfer")
    if record.attempt != body.attempt:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another attempt")
    incoming.compare(record.block_counts, body)
    if incoming.missing_pieces:
        # Such as one whose transfer was misread on the way: another attempt may be luckier.
        raise BatonError(ErrorKind.UNAVAILABLE, f"{incoming.missing_pieces} pieces never arrived")
    return record
