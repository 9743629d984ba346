"""What a transport must do, and nothing about links, credits or transfers.

    receiver                                     sender
    listener = …(host, port)
    call = listener.next_call()          ◀────   connector.open(address, request)
    staging = Staging(…, call.window(size))
    wire = call.grant(response, staging) ────▶   response, wire
                                         ◀────   wire.put(piece, payload)     bytes, then their piece
    wire.hear()                          ◀────   wire.tell(frame)             behind every earlier put
    wire.tell(frame)                     ────▶   wire.hear()

One-sided: granting a call exports the window of staging; `put` writes into one index of it, and the
piece is heard only when its bytes are there (but see `LandingWire`). All methods but `open` return at once
(`close` where a device writes waits until it has stopped); they are called by one thread, the engine's loop.
A transport's own threads do no more than move frames through bounded queues and call `wake`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.device.link_device import LinkDevice
from baton.device.stream import Event
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.link.staging import Staging, Window
from kvtransfer.protocol.frames import Piece, ReceiverFrame, SenderFrame, Words


class OutOfReachError(BatonError):
    """This transport cannot link these two processes; another may. Nobody has judged the request."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, message)


class ReceiverWire(Protocol):
    """The receiver's end of one link."""

    def hear(self) -> SenderFrame | None:
        """The next frame in the order it was sent, or None if none is there yet."""

    def tell(self, frame: ReceiverFrame) -> None:
        """Sends a frame; dropped once the wire is broken."""

    def attached(self) -> bool:
        """Whether the sender has come to this wire."""

    def broken(self) -> BatonError | None:
        """Why nothing more will be heard, once every earlier frame was; None while the wire is whole."""

    def restless(self) -> bool:
        """Whether something is on its way that no wake will tell of: look again within microseconds."""

    def fenced(self) -> bool:
        """Proof that nothing can write into the exported staging any more."""

    def close(self, error: BatonError) -> None:
        """Breaks the wire, telling the sender why if it still listens, and begins to fence it."""


class LandingWire(ReceiverWire, Protocol):
    """The receiver's end of a link between devices: a piece may be heard before its bytes are there."""

    def landed(self) -> int:
        """How many of the pieces that were heard, or are about to be, are there; they land in their order."""

    def arrival(self, piece: Piece) -> Event | None:
        """When the bytes of the piece that was heard last are there, where the receiver's device knows."""

    def checksum(self, piece: Piece) -> int:
        """What the sender's device found in a piece that has landed."""


class SenderWire(Protocol):
    """The sender's end of one link."""

    @property
    def gathers(self) -> bool:
        """Whether it takes pieces by `put_blocks` in place of `put`: a `GatheringWire`."""

    def put(self, piece: Piece, payload: memoryview) -> None:
        """Writes `payload` into the piece's staging index, then announces it; has read it on return."""

    def tell(self, frame: Words) -> None:
        """Sends a frame behind every earlier put; dropped once the wire is broken."""

    def hear(self) -> ReceiverFrame | None:
        """The next frame in the order it was sent, or None if none is there yet."""

    def broken(self) -> BatonError | None:
        """Why nothing more will be heard, once every earlier frame was; None while the wire is whole."""

    def close(self) -> None:
        """Breaks the wire. Frames that have not left are lost."""


class GatheringWire(SenderWire, Protocol):
    """The sender's end of a link between devices: it reads the blocks itself, later."""

    def put_blocks(self, piece: Piece, blocks: Sequence[int], after: Event | None = None) -> None:
        """Announces a piece of these blocks of its group, which are final at that moment of their device's;
        `gather` is to follow. Its checksum is of its place alone: that of its words is added on the way."""

    def gather(self) -> None:
        """Has the device read what was put. Apart from it, for a word that goes behind the piece is said
        sooner than that."""

    def keep_awake(self) -> None:
        """Blocks are about to be put: the device is to be ready when they are."""

    def restless(self) -> bool:
        """Whether something is under way that wakes nobody: look again within microseconds, `gathered`
        too."""

    def gathered(self) -> int:
        """How many pieces' blocks have been read since the link is there, in the order of their puts; all,
        once it is closed."""


class OpenCall(Protocol):
    """A sender that asks for a link and waits for the answer; answered exactly once."""

    @property
    def request(self) -> OpenLinkRequest: ...

    @property
    def device(self) -> LinkDevice | None:
        """Where the sender's device would write; None where bytes come to the host."""

    def window(self, pieces: int, piece_bytes: int) -> Window | None:
        """Memory for the staging of this call's link, the device's where there is one; None where messages
        bring their pieces. `BatonError` OVERLOADED."""

    def grant(self, response: OpenLinkResponse, staging: Staging) -> ReceiverWire:
        """Exports the window to this sender and gives the wire it will come to."""

    def refuse(self, error: BatonError) -> None: ...


class Listener(Protocol):
    """Where senders find a receiver."""

    @property
    def transport(self) -> str: ...

    @property
    def address(self) -> str: ...

    def next_call(self) -> OpenCall | None: ...

    def close(self) -> None:
        """Breaks every wire and ends every thread of this listener."""


class Connector(Protocol):
    """How senders reach receivers."""

    @property
    def transport(self) -> str: ...

    def takes(self, address: str) -> bool:
        """Whether this is an address of a listener of this transport."""

    def open(
        self, address: str, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        """Opens a link; blocks for at most `timeout_s`, so it is called in a thread of its own.

        Raises `BatonError`: CONFLICT where the ends do not fit together, DEADLINE, UNAVAILABLE, OVERLOADED;
        `OutOfReachError` where another transport is worth a try.
        """
