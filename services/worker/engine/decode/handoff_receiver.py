"""Receives handoffs: blocks and commit records arrive, sequences are admitted to their slots.

first piece ─▶ (early metadata: prepared) ─▶ (record, bytes still moving: completed) ─▶ commit ─▶ admitted
            └▶ withdrawn by prefill ─▶ ticket ended
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import (
    CommitPending,
    Committed,
    MetadataReceived,
    ReceiverEvent,
    TransferStarted,
    Withdrawn,
)
from services.worker.engine.decode.prepared_sequences import SequencePreparer
from services.worker.engine.decode.reservation import PreparedSequence, Reservation
from services.worker.engine.decode.reserved_slots import ReservedSlots
from services.worker.engine.decode.ticket_table import CommitOutcome

# The longest that one poll waits for pieces that a device is moving, beside decode steps and without any. A
# piece is announced about a millisecond before its bytes arrive.
_DEVICE_WAIT_BESIDE_STEPS_S, _DEVICE_WAIT_S = 0.0002, 0.002


@dataclass(slots=True, eq=False)
class HandoffReceiver:
    """The receiving end of one engine's handoffs, over links and from its own prefill. `block_bytes`: bytes
    of a block on the wire, by cache group."""

    reserved: ReservedSlots
    preparer: SequencePreparer
    signer: TicketSigner
    block_bytes: Sequence[int]
    committed: int = field(default=0, init=False)
    committed_locally: int = field(default=0, init=False)
    # Blocks of committed handoffs that were resident and so not sent, over all cache groups.
    resident_blocks: int = field(default=0, init=False)
    resident_bytes: int = field(default=0, init=False)

    def receive_pieces(self, max_pieces: int) -> None:
        """Does the part of `poll` that is safe within a decode step: writes pieces to blocks that no active
        slot reads. Events wait for the next `poll`."""
        if self.reserved.receiver is not None:
            self.reserved.receiver.progress(max_pieces)

    def poll(self, max_pieces: int) -> bool:
        """Does bounded work on the links; returns False if there was none. While a device is moving pieces
        this polls again for a short time, or until a sequence is admitted: an iteration of the engine's loop
        takes longer."""
        receiver = self.reserved.receiver
        if receiver is None:
            return False
        wait_s = _DEVICE_WAIT_BESIDE_STEPS_S if self.reserved.loop.has_work else _DEVICE_WAIT_S
        until, committed = time.monotonic() + wait_s, self.committed
        worked = self._handle(receiver.poll(max_pieces))
        while receiver.moving and self.committed == committed and time.monotonic() < until:
            worked |= self._handle(receiver.poll(max_pieces))
        return worked

    def commit(self, transfer_id: int, record: CommitRecord) -> None:
        """Admits a sequence whose KV has arrived. Raises BatonError where the record is not the
        reservation's.

        The caller has verified that the record's ticket is this engine's and for this transfer.
        """
        self._finish_admission(*self._admit(transfer_id, record), record)

    def commit_local(self, transfer_id: int, record: CommitRecord) -> None:
        """Commits like `commit`, for this worker's own prefill, which has written into the reserved
        blocks."""
        body = self.signer.verify(Ticket(body=record.ticket_body, signature=record.ticket_signature))
        if body.transfer_id != transfer_id:
            raise BatonError(ErrorKind.FORBIDDEN, "the ticket was issued for another transfer")
        self.reserved.tickets.receiving(transfer_id)
        self.commit(transfer_id, record)
        self.committed_locally += 1

    def _handle(self, events: Sequence[ReceiverEvent]) -> bool:
        for event in events:
            match event:
                case TransferStarted(transfer_id):
                    self.reserved.tickets.receiving(transfer_id)
                case MetadataReceived(transfer_id, record):
                    self._early(self.preparer.prepare, transfer_id, record)
                case CommitPending(transfer_id, record):
                    self._early(self.preparer.complete, transfer_id, record)
                case Committed(transfer_id, record):
                    self._commit_received(transfer_id, record)
                case Withdrawn(transfer_id):
                    self.reserved.end_unused(transfer_id)
        return bool(events)

    def _early(
        self, check: Callable[[Reservation, CommitRecord], object], transfer_id: int, record: CommitRecord
    ) -> None:
        """Prepares a sequence before its commit, at which an invalid record is refused."""
        entry = self.reserved.tickets.find_transfer(transfer_id)
        if entry is not None:
            with contextlib.suppress(BatonError):
                check(entry.reservation, record)
                self.reserved.arriving.add(entry.reservation.key)

    def _commit_received(self, transfer_id: int, record: CommitRecord) -> None:
        assert self.reserved.receiver is not None
        transfers = self.reserved.receiver.transfers
        try:
            reservation, prepared = self._admit(transfer_id, record)
        except BatonError as error:
            transfers.refuse(transfer_id, error)
            self.reserved.end_unused(transfer_id)
        else:
            transfers.acknowledge(transfer_id)  # before the accounting: prefill waits for it
            self._finish_admission(reservation, prepared, record)

    def _admit(self, transfer_id: int, record: CommitRecord) -> tuple[Reservation, PreparedSequence]:
        """Spends the ticket and posts the admission; `_finish_admission` follows."""
        entry = self.reserved.tickets.find_transfer(transfer_id)
        if entry is None:
            raise BatonError(ErrorKind.CONFLICT, "the ticket has ended")
        prepared = self.preparer.complete(entry.reservation, record)
        outcome = self.reserved.tickets.commit(transfer_id)
        if outcome is not CommitOutcome.ACCEPTED:
            raise BatonError(ErrorKind.CONFLICT, f"the ticket cannot be spent: {outcome.name.lower()}")
        self.reserved.loop.admit(prepared.entry)
        self.reserved.arriving.discard(entry.reservation.key)
        self.reserved.tickets.activate(transfer_id)
        return entry.reservation, prepared

    def _finish_admission(
        self, reservation: Reservation, prepared: PreparedSequence, record: CommitRecord
    ) -> None:
        """Does what can wait until the commit is acknowledged: caches the prompt's blocks, and counts."""
        reservation.prepared = None
        reservation.token_ids = tuple(record.token_ids)
        if self.reserved.prefix_cache is not None and prepared.block_hashes:
            reservation.block_hashes = prepared.block_hashes
            self.reserved.prefix_cache.add(prepared.block_hashes, reservation.blocks)
        self.resident_blocks += reservation.resident_blocks * len(self.block_bytes)
        self.resident_bytes += reservation.resident_blocks * sum(self.block_bytes)
        self.reserved.allocation.add(reservation)
        self.committed += 1
