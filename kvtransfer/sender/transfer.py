"""One transfer at its sender: the blocks it still has to read, and its commit.

    sending ──commit sent──▶ committing ──▶ acknowledged
       └──────────┬────────────────┘
                  └──▶ withdrawn (by us), failed (the receiver or the link)

A pushed block is pinned by the engine and the pin is ours: it ends with `BlockSource.unpin`, called
once for each push, when the block's last piece has been read, or the transfer has ended and nobody reads it
any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from baton.device.link_device import Moment
from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.frames import MAX_COMMIT_BYTES, WithdrawReason
from kvtransfer.protocol.piece_geometry import Geometry
from kvtransfer.protocol.ticket import resident_counts


class BlockSource(Protocol):
    """Where a block's bytes are: the engine process."""

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        """Contiguous bytes of a block, valid until the next call."""

    def unpin(self, group: int, block: int) -> None:
        """One push of this block is over."""


class TransferState(Enum):
    SENDING = 1
    COMMITTING = 2
    ACKNOWLEDGED = 3
    WITHDRAWN = 4
    FAILED = 5


@dataclass(slots=True)
class _Pushed:
    group: int
    ordinal: int
    block: int
    after: Moment | None = None
    offset: int = 0
    # Pieces of it that are being read, and whether no more will be.
    reading: int = 0
    over: bool = False


class PieceSource(NamedTuple):
    """The next piece to read: bytes of one block, or several blocks whole, which are final at one moment.
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
    def after(self) -> Moment | None:
        return self.pushed[0].after


class Transfer:
    """A handle on one transfer; made by `Sender.begin`."""

    def __init__(
        self,
        ticket: Ticket,
        body: TicketBody,
        block_bytes: tuple[int, ...],
        source: BlockSource,
        whole: Callable[[int], None],
        withdrawn: Callable[[Transfer, WithdrawReason], None],
        wake: Callable[[], None],
    ) -> None:
        self.transfer_id = body.transfer_id
        self.body = body
        self.state = TransferState.SENDING
        # Bytes of whole blocks handed to the wire, and of the one begun last.
        self.bytes_shipped = 0
        self.bytes_partial = 0
        # Waits to be sent before anything else, since without it the receiver takes nothing: the ticket, and
        # what `describe` adds. What is committed behind the last piece.
        self.ahead: bytes | None = _serialised(_with_ticket(CommitRecord(attempt=body.attempt), ticket))
        self.record: bytes | None = None
        self.commit_deadline = float("inf")
        # Staging pieces in flight: never more than the transfer's share of the window.
        self.held = 0
        self._ticket = ticket
        self._block_bytes = block_bytes
        self._source = source
        # Called for each block whose last piece went out, with its group.
        self._whole = whole
        self._withdrawn = withdrawn
        self._wake = wake
        # Leading blocks that the receiver has already, by cache group: they are not pushed.
        self.resident_counts = resident_counts(body)
        self._queue: deque[_Pushed] = deque()
        self._pushed: list[set[int]] = [set() for _ in block_bytes]

    @property
    def live(self) -> bool:
        return self.state in (TransferState.SENDING, TransferState.COMMITTING)

    @property
    def queued_blocks(self) -> int:
        """Blocks still pinned for this transfer."""
        return len(self._queue)

    def push(self, group: int, first: int, blocks: Sequence[int], after: Moment | None = None) -> None:
        """Hands over pinned blocks as the receiver's `first` and following of this group. They are final, or
        will be at that moment of their device's: the receiver may hear of them before, their bytes are read
        then.

        After the transfer has ended the blocks are unpinned at once. `ValueError` for a place that the
        ticket does not have or calls held, or that was pushed before, or after `commit`: then none is taken.
        """
        if not self.live:
            for block in blocks:
                self._source.unpin(group, block)
            return
        if self.record is not None:
            raise ValueError("push after commit")
        ordinals = range(first, first + len(blocks))
        which = f"blocks {first} to {ordinals.stop - 1} of group {group}"
        here = 0 <= group < len(self._pushed)
        if not (
            here and self.resident_counts[group] <= first <= ordinals.stop <= self.body.block_counts[group]
        ):
            raise ValueError(f"the ticket wants no {which}")
        if not self._pushed[group].isdisjoint(ordinals):
            raise ValueError(f"some of {which} were pushed before")
        self._pushed[group].update(ordinals)
        idle = not self._queue  # else whoever ships the first goes on with them
        self._queue.extend(_Pushed(group, n, block, after) for n, block in enumerate(blocks, first))
        if idle and blocks:
            self._wake()

    def describe(self, record: CommitRecord) -> None:
        """Says what is known of the sequence at the beginning, so that the receiver has made ready for it by
        the commit, which has the first token alone then. The ticket is filled in here. Before anything else,
        and once: right after the transfer was made.

        `BatonError` INVALID for a record too large to travel.
        """
        assert self.ahead is not None, "nothing of the transfer has been sent"
        self.ahead = _serialised(_with_ticket(record, self._ticket))
        self._wake()

    def commit(self, record: CommitRecord) -> None:
        """Commits behind the last pushed block. Block counts are filled in here.

        Ends with `Acknowledged` or `Failed`; nothing happens where the transfer has ended already.
        `BatonError` INVALID for a record too large to travel.
        """
        if not self.live:
            return
        if self.record is not None:
            raise ValueError("commit twice")
        whole = CommitRecord()
        whole.CopyFrom(record)
        whole.block_counts[:] = [len(ordinals) for ordinals in self._pushed]
        self.record = _serialised(whole)
        self._wake()

    def withdraw(self, reason: WithdrawReason) -> None:
        """Ends the transfer without a commit, and without an event. Idempotent."""
        if self.live:
            self.end(TransferState.WITHDRAWN)
            self._withdrawn(self, reason)
            self._wake()

    # -- the sender's part ------------------------------------------------------------------------

    def has_piece(self) -> bool:
        return bool(self._queue)

    def is_final(self) -> bool:
        """Whether the next piece's bytes are what they will be."""
        after = self._queue[0].after
        return after is None or after.ended()

    def next_group(self) -> int:
        """Of the next piece."""
        return self._queue[0].group

    def next_piece(self, geometry: Geometry, most_blocks: int = 1) -> PieceSource:
        """The next piece, of `most_blocks` blocks at most. The caller puts it on the wire (`shipped`), and
        calls `read_done` when it has been read."""
        first = self._queue[0]
        group, offset = first.group, first.offset
        run = (first,) if offset else self._run(most_blocks)
        length = geometry.piece_length(group, offset)
        last = offset + length == self._block_bytes[group]
        length *= len(run)
        for pushed in run:
            pushed.reading += 1
        first.offset += length
        return PieceSource(run, group, first.ordinal, offset, length, last)

    def _run(self, most: int) -> tuple[_Pushed, ...]:
        """The next blocks that follow each other at the receiver."""
        first = self._queue[0]
        run: list[_Pushed] = []
        for pushed in self._queue:
            follows = pushed.group == first.group and pushed.ordinal == first.ordinal + len(run)
            if len(run) == most or not follows or pushed.after is not first.after:
                break
            run.append(pushed)
        return tuple(run)

    def shipped(self, piece: PieceSource) -> None:
        """The piece is on the wire."""
        self.bytes_partial += piece.length
        if piece.last:
            for _ in piece.pushed:
                self._over(self._queue.popleft())
                self._whole(piece.group)
            self.bytes_shipped += self.bytes_partial
            self.bytes_partial = 0

    def read_done(self, piece: PieceSource) -> None:
        """Nobody reads it any more; with a block's last one its pin ends."""
        for pushed in piece.pushed:
            pushed.reading -= 1
            if pushed.over:
                self._over(pushed)

    def end(self, state: TransferState) -> None:
        """Drops what is queued and unpins it."""
        self.state = state
        while self._queue:
            self._over(self._queue.popleft())

    def _over(self, pushed: _Pushed) -> None:
        pushed.over = True
        if not pushed.reading:
            self._source.unpin(pushed.group, pushed.block)


def _with_ticket(record: CommitRecord, ticket: Ticket) -> CommitRecord:
    whole = CommitRecord(ticket_body=ticket.body, ticket_signature=ticket.signature)
    whole.MergeFrom(record)
    return whole


def _serialised(record: CommitRecord) -> bytes:
    serialised: bytes = record.SerializeToString()
    if len(serialised) > MAX_COMMIT_BYTES:
        raise BatonError(ErrorKind.INVALID, f"a commit record of {len(serialised)} bytes cannot travel")
    return serialised
