"""The interfaces that a transport implements. It knows nothing of credits and transfers.

    receiver                                        sender
    listener = …(host, port)
    request = listener.next_request()       ◀────   connector.open(endpoint, request)
    staging = Staging(…, request.window(size))
    wire = request.grant(response, staging) ────▶   response, wire
                                            ◀────   wire.put(piece, payload)   bytes, then their piece
    wire.receive()                          ◀────   wire.send(frame)           after every earlier put
    wire.send(frame)                        ────▶   wire.receive()

One-sided: granting a request exports the staging window; `put` writes one index of it, and the piece is
received only when its bytes are there (except on a `DeviceReceiverWire`). All methods but `Connector.open`
return at once (`close` blocks where a device writes, until it has stopped); they are called by one thread,
the engine's loop. A transport's own threads only move frames through bounded queues and call `wake`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.link_device import LinkDevice
from baton.device.streams.stream import Event
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.link.staging import Staging, WindowMemory
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import Piece, ReceiverFrame, SenderControl, SenderFrame


class UnreachableError(BatonError):
    """This transport cannot link these two processes; another may. The request was not judged."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, message)


class ReceiverWire(Protocol):
    """The receiver's end of one link."""

    def receive(self) -> SenderFrame | None:
        """The next frame in the order of sending, or None if none has come yet."""

    def send(self, frame: ReceiverFrame) -> None:
        """Sends a frame; dropped once the wire is broken."""

    def attached(self) -> bool:
        """True once the sender has connected to this wire."""

    def failure(self) -> BatonError | None:
        """Says why nothing more will be received, once every earlier frame was; None while the wire works."""

    def busy_poll(self) -> bool:
        """True while something is under way that causes no wake-up: poll again within microseconds."""

    def fenced(self) -> bool:
        """True once it is certain that nothing can write the exported staging any more."""

    def close(self, error: BatonError) -> None:
        """Breaks the wire, sends the sender the reason if it still listens, and starts fencing."""


class DeviceReceiverWire(ReceiverWire, Protocol):
    """The receiver's end of a link between devices: a piece may be received before its bytes are there."""

    def arrived_count(self) -> int:
        """Number of pieces that have their bytes in staging, in the order of the pieces."""

    def arrival_event(self, piece: Piece) -> Event | None:
        """An event that completes with the bytes of the piece received last, where this device has one."""

    def checksum(self, piece: Piece) -> int:
        """The checksum that the sender's device computed of a piece whose bytes are there."""


class SenderWire(Protocol):
    """The sender's end of one link."""

    @property
    def shares_clock(self) -> bool:
        """True if both ends have one monotonic clock: they are on one host."""

    @property
    def on_device(self) -> bool:
        """True if the wire takes pieces by `announce` and `read` in place of `put`: a `DeviceSenderWire`."""

    def put(self, piece: Piece, payload: memoryview) -> None:
        """Writes `payload` into the piece's staging index, then announces it; has read it on return."""

    def send(self, frame: SenderControl) -> None:
        """Sends a frame after every earlier put; dropped once the wire is broken."""

    def receive(self) -> ReceiverFrame | None:
        """The next frame in the order of sending, or None if none has come yet."""

    def failure(self) -> BatonError | None:
        """Says why nothing more will be received, once every earlier frame was; None while the wire works."""

    def close(self) -> None:
        """Breaks the wire. Frames that have not been sent are lost."""


class DeviceSenderWire(SenderWire, Protocol):
    """The sender's end of a link between devices: the device reads the blocks itself, later."""

    def announce(self, piece: Piece) -> None:
        """Announces a piece; `read` must follow. Its checksum covers its place alone: the device adds that of
        its words."""

    def read(self, piece: Piece, blocks: Sequence[int], after: Event | None) -> Event | None:
        """Enqueues the device's read of an announced piece's blocks, which are final once `after` completes.
        The event completes when they have been read; None where the device fails, which breaks the link, or
        the link is closed: the blocks may be read until `close` returns. Separate from `announce`, so that a
        frame that follows the piece can be sent first, which is faster."""

    def keep_warm(self, *, reading: bool) -> None:
        """Keeps the device from going idle: blocks are about to be sent. `reading`: some reads have not
        completed."""

    def busy_poll(self) -> bool:
        """True while something other than a read is under way that causes no wake-up: poll again within
        microseconds."""


class LinkRequest(Protocol):
    """A sender that requests a link and waits; answered exactly once, by `grant` or `refuse`."""

    @property
    def request(self) -> OpenLinkRequest: ...

    @property
    def device(self) -> LinkDevice | None:
        """The receiver's device that the sender's would write to; None where bytes come to the host."""

    def window(self, pieces: int, piece_bytes: int) -> WindowMemory | None:
        """Memory for the staging of this link, on the device where there is one; None where messages bring
        their pieces. BatonError(OVERLOADED) where there is none left."""

    def grant(self, response: OpenLinkResponse, staging: Staging) -> ReceiverWire:
        """Exports the window to this sender; the wire that it will connect to."""

    def refuse(self, error: BatonError) -> None: ...


class Listener(Protocol):
    """The end of a receiver that senders connect to."""

    @property
    def endpoint(self) -> Endpoint: ...

    def next_request(self) -> LinkRequest | None: ...

    def close(self) -> None:
        """Breaks every wire and ends every thread of this listener."""


class Connector(Protocol):
    """Opens links to receivers over one transport."""

    @property
    def transport(self) -> str: ...

    def reaches(self, endpoint: Endpoint) -> bool:
        """True if the endpoint is of this transport and can be reached from this process."""

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        """Opens a link; blocks for at most `timeout_s`, so it is called in a thread of its own.

        BatonError: CONFLICT where the ends do not fit together, DEADLINE, UNAVAILABLE, OVERLOADED;
        UnreachableError where another transport should be tried.
        """
