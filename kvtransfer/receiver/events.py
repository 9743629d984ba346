"""What a receiver reports to the loop that polls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.frames import WithdrawReason

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Arrived:
    """The first piece of a transfer is here; from now on only the sender's word ends it early."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Described:
    """A record came ahead of its blocks, and pays with our own ticket: all but what the last step finds. The
    record that is committed is the same in all else. Who admits can look at it meanwhile."""

    transfer_id: int
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class Announced:
    """The record is here and pays with our own ticket; a device still moves the last bytes.

    `Committed` follows with the same record unless the transfer fails. Who admits can prepare meanwhile.
    """

    transfer_id: int
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class Committed:
    """Every byte arrived and was scattered, and the record pays with our own ticket.

    The loop answers with `Receiver.acknowledge` or `Receiver.refuse`.
    """

    transfer_id: int
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The transfer ended without a commit; the receiver has forgotten it already."""

    transfer_id: int
    reason: WithdrawReason
    message: str


ReceiverEvent = Arrived | Described | Announced | Committed | Withdrawn
