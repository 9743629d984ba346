"""One transfer at its sender: the blocks that are still to be read, and its commit.

    sending ──commit sent──▶ committing ──▶ acknowledged
       └──────────┬────────────────┘
                  └──▶ withdrawn (by the sender), failed (by the receiver or the link)

A pushed block is pinned by the engine. The transfer releases the pin with `BlockSource.unpin`, once for each
push: when the block's last piece has been read, or the transfer has ended and no read of it is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.stream import Event
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.frames import MAX_COMMIT_BYTES, WithdrawReason
from kvtransfer.protocol.piece_geometry import PieceGeometry
from kvtransfer.protocol.ticket import resident_counts


class BlockSource(Protocol):
    """The engine's blocks, as a sender reads them."""

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        """`length` contiguous bytes of a block from `offset` on, valid until the next call."""

    def unpin(self, group: int, block: int) -> None:
        """Releases the pin of one push of this block."""


class TransferState(Enum):
    SENDING = 1
    COMMITTING = 2
    ACKNOWLEDGED = 3
    WITHDRAWN = 4
    FAILED = 5


@dataclass(slots=True)
class _Pushed:
    """A pushed block, final once `after` completes."""

    group: int
    ordinal: int
    block: int
    after: Event | None = None
    offset: int = 0
    # Its pieces that are being read, and whether no further ones will be.
    reading: int = 0
    done: bool = False


class PieceSource(NamedTuple):
    """A piece to read: bytes of one block, or several whole blocks that become final with one event.
    `last`: it ends with its block."""

    pushed: tuple[_Pushed, ...]
    group: int
    ordinal: int
    offset: int
    length: int
    last: bool

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(pushed.block for pushed in self.pushed)

    @property
    def after(self) -> Event | None:
        return self.pushed[0].after


class Transfer:
    """One transfer; made by `Sender.begin`."""

    def __init__(
        self,
        ticket: Ticket,
        body: TicketBody,
        block_bytes: tuple[int, ...],
        source: BlockSource,
        on_block: Callable[[int], None],
        on_withdraw: Callable[[Transfer, WithdrawReason], None],
        wake: Callable[[], None],
    ) -> None:
        """`on_block` is called with the group of each block whose last piece was given to a wire;
        `on_withdraw` when the transfer was withdrawn."""
        self.transfer_id = body.transfer_id
        self.body = body
        self.state = TransferState.SENDING
        # Bytes given to a wire: of whole blocks, and of the block begun last.
        self.bytes_shipped = 0
        self.bytes_partial = 0
        # Sent before anything else, since the receiver accepts nothing without a ticket; and the record that
        # is committed after the last piece.
        self.metadata: bytes | None = _serialised(_with_ticket(CommitRecord(attempt=body.attempt), ticket))
        self.record: bytes | None = None
        self.commit_deadline = float("inf")
        # Staging indices in use: at most `CreditWindow.max_per_transfer`.
        self.pieces_in_flight = 0
        self._ticket = ticket
        self._block_bytes = block_bytes
        self._source = source
        self._on_block = on_block
        self._on_withdraw = on_withdraw
        self._wake = wake
        # Leading blocks that the receiver already has, by cache group: they are not pushed.
        self.resident_counts = resident_counts(body)
        self._queue: deque[_Pushed] = deque()
        self._pushed: list[set[int]] = [set() for _ in block_bytes]

    @property
    def active(self) -> bool:
        """True if the transfer can still be committed."""
        return self.state in (TransferState.SENDING, TransferState.COMMITTING)

    @property
    def queued_blocks(self) -> int:
        """Blocks still pinned for this transfer."""
        return len(self._queue)

    def push(self, group: int, first: int, blocks: Sequence[int], after: Event | None = None) -> None:
        """Takes over pinned blocks as the receiver's blocks `first` and following of this group. They are
        final, or become so when `after` completes: they may be announced before, but their bytes
        are read then.

        After the transfer has ended the blocks are unpinned at once. ValueError, with none taken, for places
        that the ticket does not have, that are resident or were pushed before, and after `commit`.
        """
        if not self.active:
            for block in blocks:
                self._source.unpin(group, block)
            return
        if self.record is not None:
            raise ValueError("push after commit")
        ordinals = range(first, first + len(blocks))
        which = f"blocks {first} to {ordinals.stop - 1} of group {group}"
        known = 0 <= group < len(self._pushed)
        if not (
            known and self.resident_counts[group] <= first <= ordinals.stop <= self.body.block_counts[group]
        ):
            raise ValueError(f"the ticket does not expect {which}")
        if not self._pushed[group].isdisjoint(ordinals):
            raise ValueError(f"some of {which} were pushed before")
        self._pushed[group].update(ordinals)
        idle = not self._queue  # otherwise the queued blocks are being shipped already
        self._queue.extend(_Pushed(group, n, block, after) for n, block in enumerate(blocks, first))
        if idle and blocks:
            self._wake()

    def send_metadata(self, record: CommitRecord) -> None:
        """Sends early what is known before prefill ends, so that the receiver can prepare the sequence; the
        commit then adds the first token alone. The ticket is filled in here. Called once, right after the
        transfer was made.

        BatonError(INVALID) for a record that is too large.
        """
        assert self.metadata is not None, "metadata follows begin, before a poll"
        self.metadata = _serialised(_with_ticket(record, self._ticket))
        self._wake()

    def commit(self, record: CommitRecord) -> None:
        """Commits after the last pushed block. Block counts are filled in here.

        `Acknowledged` or `Failed` follows; does nothing where the transfer has ended already.
        BatonError(INVALID) for a record that is too large.
        """
        if not self.active:
            return
        if self.record is not None:
            raise ValueError("commit twice")
        whole = CommitRecord()
        whole.CopyFrom(record)
        whole.block_counts[:] = [len(ordinals) for ordinals in self._pushed]
        self.record = _serialised(whole)
        self._wake()

    def withdraw(self, reason: WithdrawReason) -> None:
        """Ends the transfer without a commit and without an event. Idempotent."""
        if self.active:
            self.end(TransferState.WITHDRAWN)
            self._on_withdraw(self, reason)
            self._wake()

    # -- called by the sender ------------------------------------------------------------------------

    def has_piece(self) -> bool:
        """True if blocks are still to be read."""
        return bool(self._queue)

    def is_final(self) -> bool:
        """True if the next piece's bytes can be read."""
        after = self._queue[0].after
        return after is None or after.query()

    def next_group(self) -> int:
        """The cache group of the next piece."""
        return self._queue[0].group

    def next_piece(self, geometry: PieceGeometry, max_blocks: int = 1) -> PieceSource:
        """Takes the next piece, of at most `max_blocks` blocks. The caller must call `shipped` when it is on
        the wire, and `read_done` when it has been read."""
        first = self._queue[0]
        group, offset = first.group, first.offset
        run = (first,) if offset else self._run(max_blocks)
        length = geometry.piece_length(group, offset)
        last = offset + length == self._block_bytes[group]
        length *= len(run)
        for pushed in run:
            pushed.reading += 1
        first.offset += length
        return PieceSource(run, group, first.ordinal, offset, length, last)

    def _run(self, most: int) -> tuple[_Pushed, ...]:
        """The next blocks, as far as they are consecutive at the receiver."""
        first = self._queue[0]
        run: list[_Pushed] = []
        for pushed in self._queue:
            follows = pushed.group == first.group and pushed.ordinal == first.ordinal + len(run)
            if len(run) == most or not follows or pushed.after is not first.after:
                break
            run.append(pushed)
        return tuple(run)

    def shipped(self, piece: PieceSource) -> None:
        """Records that the piece is on the wire."""
        self.bytes_partial += piece.length
        if piece.last:
            for _ in piece.pushed:
                self._finish(self._queue.popleft())
                self._on_block(piece.group)
            self.bytes_shipped += self.bytes_partial
            self.bytes_partial = 0

    def read_done(self, piece: PieceSource) -> None:
        """Records that the piece has been read; the last one of a block releases its pin."""
        for pushed in piece.pushed:
            pushed.reading -= 1
            if pushed.done:
                self._finish(pushed)

    def end(self, state: TransferState) -> None:
        """Ends the transfer: drops and unpins what is queued."""
        self.state = state
        while self._queue:
            self._finish(self._queue.popleft())

    def _finish(self, pushed: _Pushed) -> None:
        pushed.done = True
        if not pushed.reading:
            self._source.unpin(pushed.group, pushed.block)


def _with_ticket(record: CommitRecord, ticket: Ticket) -> CommitRecord:
    whole = CommitRecord(ticket_body=ticket.body, ticket_signature=ticket.signature)
    whole.MergeFrom(record)
    return whole


def _serialised(record: CommitRecord) -> bytes:
    serialised: bytes = record.SerializeToString()
    if len(serialised) > MAX_COMMIT_BYTES:
        raise BatonError(ErrorKind.INVALID, f"a commit record of {len(serialised)} bytes is too large")
    return serialised
