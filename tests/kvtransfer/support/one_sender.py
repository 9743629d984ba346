"""A sender whose receivers' frames are the test's."""

from __future__ import annotations

from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.link.settings import LinkSettings
from kvtransfer.protocol.frames import (
    Piece,
    ReceiverFrame,
    SenderFrame,
    WithdrawReason,
    decode_from_sender,
    encode,
)
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import Sender
from kvtransfer.sender.transfer import Transfer, TransferState
from tests.kvtransfer.support.memory_transport import Pipe
from tests.kvtransfer.support.peers import FINGERPRINT, FakeClock, identity
from tests.kvtransfer.support.several_routes import SHAPE, SeveralRoutes
from tests.support.waiting import block_until

# More than a sender does in one poll, unless a test sets another bound.
MANY = 99


class OneSender:
    """A sender with open links, one to each of its receivers; the test polls."""

    def __init__(self, *transports: str) -> None:
        self.ways = [SeveralRoutes([transport]) for transport in transports]
        self.wakes = 0
        self.source = self.ways[0].peers.source
        self.sender = Sender(
            settings=LinkSettings(identity("sender"), FINGERPRINT, SHAPE.block_bytes, SHAPE.timeout_s),
            source=self.source, wake=self._wake,
            clock=self.ways[0].clock, connectors=[way for ways in self.ways for way in ways.ways],
        )  # fmt: skip
        for link, ways in enumerate(self.ways):
            first = self.begin(1, link=link)

            def both(receiver: Receiver = ways.peers.receiver) -> None:
                receiver.poll(1)
                self.sender.poll(MANY)

            block_until(lambda link=link: self.sender.counters.links_opened > link, step=both)  # type: ignore[misc]
            first.withdraw(WithdrawReason.FINISHED)
            self.reported(link)

    def _wake(self) -> None:
        self.wakes += 1

    def begin(self, transfer: int, blocks: int = 0, link: int = 0) -> Transfer:
        """Begins a transfer and pushes this many blocks."""
        begun = self.sender.begin(*self.ways[link].peers.ticket(transfer, [blocks]))
        for block in range(blocks):
            self.source.pin(0, block)
        begun.push(0, 0, range(blocks))
        return begun

    def commit(self, transfer: int, blocks: int = 0, link: int = 0) -> Transfer:
        """The same, committed, and all of it is sent."""
        begun = self.begin(transfer, blocks, link)
        begun.commit(CommitRecord())
        self.sender.poll(MANY)
        assert begun.state is TransferState.COMMITTING
        return begun

    @property
    def clock(self) -> FakeClock:
        return self.ways[0].clock

    def pipe(self, link: int = 0) -> Pipe:
        return self.ways[link].ways[0].pipes[0]

    def reported(self, link: int = 0) -> list[SenderFrame]:
        """The frames that the receiver has been sent since the last call. It handles none of them."""
        frames = [decode_from_sender(message)[0] for message in self.pipe(link).to_receiver]
        self.pipe(link).to_receiver.clear()
        return frames

    def pieces(self, link: int = 0) -> int:
        """The number of pieces that the link has been sent since the last call."""
        return sum(isinstance(frame, Piece) for frame in self.reported(link))

    def deliver(self, *frames: ReceiverFrame, link: int = 0) -> None:
        self.pipe(link).to_sender.extend(encode(frame) for frame in frames)

    def polled(self, max_pieces: int = MANY) -> bool:
        """True if this poll asks for another."""
        before = self.wakes
        self.sender.poll(max_pieces)
        return self.wakes > before

    def close(self) -> None:
        self.sender.close()
        for ways in self.ways:
            ways.peers.close()
