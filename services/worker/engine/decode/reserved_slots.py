"""The slots and blocks that live tickets stand for: who owns them, and how they are freed.

add ─▶ reserved ─▶ committed, active ─▶ its slot has ended and its output was read ─▶ freed
          │ cancelled, expired, withdrawn, superseded by a higher attempt
          ▼
        freed at once: only this engine writes into these blocks, and it looks the ticket up first
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.base.errors import BatonError, ErrorKind
from baton.engine.decode.slots import SlotPool
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockTables
from baton.engine.prefix_cache.cache import PrefixCache
from baton.v1.engine_pb2 import EngineEvent, TicketEndedEvent
from baton.v1.worker_pb2 import SlotState
from kvtransfer.receiver.receiver import Receiver
from services.common.engine.attempt_key import AttemptKey
from services.worker.engine.decode.block_allocation import BlockAllocation
from services.worker.engine.decode.reservation import Reservation, SlotKey
from services.worker.engine.decode.ticket_table import TicketEntry, TicketTable
from services.worker.engine.startup.kv_wire_format import WireBlocks


@dataclass(frozen=True, slots=True)
class ReservedBlockSink:
    """The receiver's `BlockSink`: the blocks that live tickets reserve."""

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


@dataclass(slots=True, eq=False)
class ReservedSlots:
    """Owns every slot and block that a ticket stands for until they are freed, once.

    `receiver`: None where no other worker sends blocks to this one.
    """

    tickets: TicketTable[Reservation]
    loop: DecodeLoop
    slots: SlotPool
    pools: BlockPools
    allocation: BlockAllocation
    receiver: Receiver | None
    prefix_cache: PrefixCache | None
    emit: Callable[[EngineEvent], None]
    dropped_unknown: int = field(default=0, init=False)
    # The requests' TPOT limits, in ascending order.
    _tpot_limits: list[float] = field(default_factory=list, init=False)
    # Slots whose sequences are on their way, and are prepared.
    arriving: set[SlotKey] = field(default_factory=set, init=False)
    _by_slot: dict[SlotKey, TicketEntry[Reservation]] = field(default_factory=dict, init=False)

    def add(
        self, key: AttemptKey, transfer_id: int, reservation: Reservation, ttl_s: float
    ) -> TicketEntry[Reservation]:
        """Takes ownership of a reservation's slot and blocks."""
        entry = self.tickets.reserve(key, transfer_id, reservation, ttl_s)
        self._by_slot[reservation.key] = entry
        if reservation.tpot_s is not None:
            bisect.insort(self._tpot_limits, reservation.tpot_s)
        self.loop.limit_tpot(reservation.key[0], reservation.tpot_s)
        return entry

    @property
    def tightest_tpot_s(self) -> float:
        """The shortest TPOT limit that a request has; infinite without any."""
        return self._tpot_limits[0] if self._tpot_limits else math.inf

    @property
    def all_limited(self) -> bool:
        """True if all requests have a TPOT limit."""
        return len(self._tpot_limits) == len(self._by_slot)

    def owned_blocks(self) -> list[BlockTables]:
        """The block tables of all live tickets."""
        return [entry.reservation.blocks for entry in self._by_slot.values()]

    def slot_states(self) -> list[SlotState.ValueType]:
        """The state of every slot, in slot order."""
        states = [SlotState.SLOT_STATE_FREE] * self.slots.total
        for (slot, _), entry in self._by_slot.items():
            states[slot] = SlotState.SLOT_STATE_RESERVED if entry.awaited else SlotState.SLOT_STATE_ACTIVE
        return states

    def cancel(self, key: AttemptKey) -> None:
        """Stops an attempt in any state and leaves a tombstone; idempotent."""
        entry = self.tickets.find(key)
        if entry is None:
            self.tickets.cancel(key)
        elif entry.awaited:
            self._end_unused(entry)
        elif not entry.reservation.ending:
            entry.reservation.ending = True
            self.loop.cancel(*entry.reservation.key)

    def expire(self) -> None:
        """Cancels attempts whose deadline has passed by this worker's clock."""
        for entry in self.tickets.expired():
            self.cancel(entry.key)

    def end_unused(self, transfer_id: int) -> None:
        """Ends a ticket that will not be committed; nothing where it was committed or has ended."""
        entry = self.tickets.find_transfer(transfer_id)
        if entry is not None and entry.awaited:
            self._end_unused(entry)

    def slot_ended(self, slot: int, generation: int, output: Sequence[int] = ()) -> None:
        """Frees a slot whose last output the front has read. `output`: the sequence's output tokens here; its
        blocks stay cached under their hashes."""
        entry = self._by_slot.get((slot, generation))
        if entry is None:
            self.dropped_unknown += 1
            return
        self._free(entry, output)

    def borrow(
        self, transfer_id: int, key: AttemptKey, token_count: int, revoke: Callable[[], None]
    ) -> BlockTables:
        """The reserved blocks for this worker's own prefill of `token_count` tokens; `revoke` is called
        before they are freed. Raises BatonError(CONFLICT) where the ticket has ended or is another
        attempt's."""
        entry = self.tickets.find_transfer(transfer_id)
        if entry is None or entry.key != key or not entry.awaited:
            raise BatonError(ErrorKind.CONFLICT, "the ticket has ended")
        entry.reservation.revoke_loan = revoke
        return self._blocks_for(entry.reservation, token_count)

    def lend_cached(self, transfer_id: int, prefix: BlockTables, token_count: int) -> BlockTables:
        """Replaces a borrowed reservation's leading blocks by cached ones and takes over one reference of
        each; its blocks for `token_count` tokens."""
        entry = self.tickets.find_transfer(transfer_id)
        assert entry is not None, "a ticket ends after the prefill that borrows from it"
        self.pools.release(entry.reservation.replace_first(prefix))
        return self._blocks_for(entry.reservation, token_count)

    def _blocks_for(self, reservation: Reservation, token_count: int) -> BlockTables:
        counts = self.pools.counts_for(token_count)
        return tuple(blocks[:count] for blocks, count in zip(reservation.blocks, counts, strict=True))

    def _end_unused(self, entry: TicketEntry[Reservation]) -> None:
        if self.receiver is not None:
            self.receiver.transfers.forget(entry.transfer_id)
        self._free(entry)
        slot, generation = entry.reservation.key
        ended = TicketEndedEvent(attempt=entry.reservation.attempt, slot=slot, generation=generation)
        self.emit(EngineEvent(ticket_ended=ended))

    def _free(self, entry: TicketEntry[Reservation], output: Sequence[int] = ()) -> None:
        reservation = entry.reservation
        self.allocation.remove(reservation.key, len(output) or None)
        self.tickets.end(entry.transfer_id)
        if reservation.revoke_loan is not None:
            reservation.revoke_loan()
        del self._by_slot[reservation.key]
        self.arriving.discard(reservation.key)
        if reservation.tpot_s is not None:
            self._tpot_limits.remove(reservation.tpot_s)
        self.loop.limit_tpot(reservation.key[0], None)
        if self.prefix_cache is not None and output:
            tokens = (*reservation.token_ids, *output[:-1])  # the last token has no KV
            hashes = self.prefix_cache.hashes_of(tokens, reservation.tenant, known=reservation.block_hashes)
            self.prefix_cache.add(hashes, reservation.blocks)
        self.pools.release(reservation.blocks)
        self.loop.learn(*reservation.key)
        self.slots.release(*reservation.key)
