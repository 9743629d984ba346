"""Reports of a receiver to the loop that polls it: events, and counters since its start."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.frames import WithdrawReason


@dataclass(frozen=True, slots=True)
class TransferStarted:
    """The first piece of a transfer has come; from now on only its sender or its link ends it early."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class MetadataReceived:
    """Early metadata, with a ticket of this receiver: the record without what prefill's last step adds. The
    committed record will be the same otherwise. The engine can prepare the sequence meanwhile."""

    transfer_id: int
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class CommitPending:
    """The commit has come; a device still moves the last bytes.

    `Committed` follows with the same record unless the transfer fails. The engine can prepare the sequence
    meanwhile.
    """

    transfer_id: int
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class Committed:
    """Every byte has arrived and was scattered, and the record has a ticket of this receiver.

    The loop answers with `InboundTransfers.acknowledge` or `refuse`.
    """

    transfer_id: int
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The transfer ended without a commit; the receiver no longer knows it."""

    transfer_id: int
    reason: WithdrawReason
    message: str


ReceiverEvent = TransferStarted | MetadataReceived | CommitPending | Committed | Withdrawn


@dataclass(slots=True)
class ReceiverCounters:
    """Totals since the receiver was made, for integrity reports."""

    # Whole blocks that arrived, by cache group; bytes counts every verified piece.
    blocks_received: list[int]
    bytes_received: int = 0
    transfers_committed: int = 0
    # Frames about unknown, forgotten or ended transfers, duplicates among them.
    dropped_unknown: int = 0
    checksum_failures: int = 0
    links_opened: int = 0
    links_refused: int = 0
    links_broken: int = 0
    links_fenced: int = 0
