"""Where the receiver writes: the blocks that live tickets reserve."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import BatonError, ErrorKind
from services.worker.engine.decode.reservation import Reservation
from services.worker.engine.decode.ticket_table import TicketTable
from services.worker.engine.startup.kv_wire_format import WireBlocks


@dataclass(frozen=True, slots=True)
class ReservedBlockSink:
    """The receiver's `BlockSink`."""

    tickets: TicketTable[Reservation]
    wire: WireBlocks

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        """Writes verified bytes into a block. Raises BatonError(CONFLICT) where the ticket has ended."""
        self.wire.write(group, self.place(transfer_id, group, ordinal), offset, data)

    def place(self, transfer_id: int, group: int, ordinal: int) -> int:
        """The block reserved as `ordinal`-th of a cache group. Raises BatonError(CONFLICT) likewise."""
        entry = self.tickets.find_transfer(transfer_id)
        if entry is None:
            raise BatonError(ErrorKind.CONFLICT, "the ticket of this transfer has ended")
        return entry.reservation.blocks[group][ordinal]
