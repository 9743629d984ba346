"""The receiver's end of an ipc link: frames out of the ring, and the proof that the sender can no longer
write.

The fence is the sender's report that it has unmapped the window, or the end of its process (a pidfd, taken
when it connected). A stopped sender has given neither: its window stays quarantined.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from baton.base.errors import BatonError
from baton.device.streams.stream import Event
from baton.v1.transfer_pb2 import SignedOpenLinkResponse
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.frames import FrameError, Piece, SenderFrame, decode_headers
from kvtransfer.transports.ipc.control import HEARTBEAT_S, Control, ControlByte, send_message
from kvtransfer.transports.ipc.memory import LinkMemory
from kvtransfer.transports.ipc.wire import IpcWire


class IpcReceiverWire(IpcWire):
    """A `ReceiverWire`; a `DeviceReceiverWire` where the window is device memory."""

    def __init__(
        self, memory: LinkMemory, staging: Staging, wake: Callable[[], None], *, on_device: bool = False
    ) -> None:
        rings = memory.receiver_rings(staging.pieces)
        super().__init__(rings, wake, "sender", between_devices=on_device)
        self._memory = memory
        self._staging = staging
        self._state = threading.Lock()
        self._attached = False
        self._fenced = False
        self._abandoned = False
        # For a window on a device: the counter of arrived pieces, and the checksums that the sender's device
        # wrote, by the piece's index.
        self._arrived = memory.arrived() if on_device else None
        self._sums = memory.sums(staging.pieces) if on_device else None
        self._received: deque[SenderFrame] = deque()

    def receive(self) -> SenderFrame | None:
        if self._received:
            return self._received.popleft()
        message = self._take()
        if message is None:
            return None
        try:
            for frame in decode_headers(message):
                if isinstance(frame, Piece):
                    self._staging.take(frame)
                self._received.append(frame)
        except FrameError as malformed:
            self._malformed(malformed)
        return self._received.popleft() if self._received else None

    def arrived_count(self) -> int:
        assert self._arrived is not None, "on the host a received piece is there"
        return int(self._arrived[0])

    def arrival_event(self, piece: Piece) -> Event | None:
        """Returns None: the sender's device brings the bytes, and counts them for the host."""
        return None

    def checksum(self, piece: Piece) -> int:
        assert self._sums is not None, "on the host a piece's checksum is in its header"
        return self._sums.of(piece.staging)

    def attached(self) -> bool:
        return self._attached

    def fenced(self) -> bool:
        with self._state:
            return self._closed and (self._fenced or self.control is None)

    def close(self, error: BatonError) -> None:
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._break(error)
            if self.control is None:
                self._memory.shared.drop_descriptor()
            else:
                self.control.send_error(error)
                self.control.finish()
                self.control.release()

    def abandon(self) -> None:
        """Ends the thread that waits for the fence without one: the receiver's process is ending."""
        self._abandoned = True
        if self.control is not None:
            self.control.end()

    def serve(self, sock: socket.socket, response: SignedOpenLinkResponse, sender: int) -> None:
        """Runs from the grant to the fence, in a thread of its own; `sender`: the pidfd of the process that
        connected."""
        control = self._export(sock, response)
        if control is not None:
            self._fenced = self._wait_for_end(control) or self._wait_for_fence(control, sender)
            control.release()
        self._wake()

    def _export(self, sock: socket.socket, response: SignedOpenLinkResponse) -> Control | None:
        """Passes the memory to the sender; None where the link was closed before, and nothing was passed."""
        with self._state:
            if self._closed:
                sock.close()
                return None
            control = Control(sock)
            with contextlib.suppress(OSError):  # it closed the socket, and may have the memory all the same
                send_message(sock, 0, response.SerializeToString(), self._memory.shared.fd)
            self._memory.shared.drop_descriptor()
            self.control = control  # from here on the loop sends too
            return control

    def _wait_for_fence(self, control: Control, sender: int) -> bool:
        """Waits until the sender can no longer write: it has ended, or has resumed and unmapped the window.
        Returns False if the wait was abandoned."""
        process = select.poll()
        process.register(sender, select.POLLIN)
        while not self._abandoned:
            if process.poll(1000 * HEARTBEAT_S if control.ended else 0):
                return True
            if not control.ended:
                with contextlib.suppress(ValueError):
                    if ControlByte.UNMAPPED in control.wait():
                        return True
        return False

    def _handle(self, byte: ControlByte) -> None:
        super()._handle(byte)
        self._attached |= byte is ControlByte.ATTACHED
