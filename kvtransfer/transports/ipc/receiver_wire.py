"""The receiver's end of an ipc link: frames out of the ring, and the proof that the sender can write no more.

The fence is the sender's word that it has unmapped the window, or the end of its process (a pidfd, taken
when it connected). A sender that is stopped has given neither: its window stays quarantined.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from baton.device.stream import Event
from baton.errors import BatonError
from baton.v1.transfer_pb2 import SignedOpenLinkResponse
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.frames import FrameError, Piece, ReceiverFrame, SenderFrame, decode_announced, encode
from kvtransfer.transports.ipc.control import BEAT_S, Control, Word, send_message
from kvtransfer.transports.ipc.memory import LinkMemory
from kvtransfer.transports.ipc.wire import IpcWire


class IpcReceiverWire(IpcWire):
    """One link at the receiver."""

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
        # Of a window on a device: how many pieces are there, and what the sender's device found, by index.
        self._landed = memory.landed() if on_device else None
        self._sums = memory.sums(staging.pieces) if on_device else None
        self._announced: deque[SenderFrame] = deque()

    def hear(self) -> SenderFrame | None:
        if self._announced:
            return self._announced.popleft()
        message = self._take()
        if message is None:
            return None
        try:
            for frame in decode_announced(message):
                if isinstance(frame, Piece):
                    self._staging.take(frame)
                self._announced.append(frame)
        except FrameError as malformed:
            self._garbled(malformed)
        return self._announced.popleft() if self._announced else None

    def landed(self) -> int:
        assert self._landed is not None, "on the host a piece that is heard is there"
        return int(self._landed[0])

    def arrival(self, piece: Piece) -> Event | None:
        """The sender's device brings them, and tells the host."""
        return None

    def checksum(self, piece: Piece) -> int:
        assert self._sums is not None, "on the host a piece's checksum is its header's"
        return self._sums.of(piece.staging)

    def tell(self, frame: ReceiverFrame) -> None:
        self._add(encode(frame))

    def attached(self) -> bool:
        return self._attached

    def fenced(self) -> bool:
        with self._state:
            return self._closed and (self._fenced or self._control is None)

    def close(self, error: BatonError) -> None:
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._break(error)
            if self._control is None:
                self._memory.drop_descriptor()
            else:
                self._control.say_error(error)
                self._control.finish()
                self._control.release()

    def abandon(self) -> None:
        """The thread that waits for the fence ends without it: the process that needs it closes."""
        self._abandoned = True
        if self._control is not None:
            self._control.end()

    def serve(self, sock: socket.socket, response: SignedOpenLinkResponse, sender: int) -> None:
        """From the grant to the fence, in a thread of its own; `sender` is the pidfd of who connected."""
        control = self._export(sock, response)
        if control is not None:
            self._fenced = self._listen(control) or self._wait_for_fence(control, sender)
            control.release()
        self._wake()

    def _export(self, sock: socket.socket, response: SignedOpenLinkResponse) -> Control | None:
        """Gives the sender the memory; None where the link was closed before, and nobody was given any."""
        with self._state:
            if self._closed:
                sock.close()
                return None
            control = Control(sock)
            with contextlib.suppress(OSError):  # it has gone, and may have the memory all the same
                send_message(sock, 0, response.SerializeToString(), self._memory.descriptor)
            self._memory.drop_descriptor()
            self._control = control  # from here on the loop speaks too
            return control

    def _wait_for_fence(self, control: Control, sender: int) -> bool:
        """Whether the sender can write no more: it is gone, or has woken and unmapped the window."""
        process = select.poll()
        process.register(sender, select.POLLIN)
        while not self._abandoned:
            if process.poll(1000 * BEAT_S if control.ended else 0):
                return True
            if not control.ended:
                with contextlib.suppress(ValueError):
                    if Word.UNMAPPED in control.wait():
                        return True
        return False

    def _heard(self, word: Word) -> None:
        super()._heard(word)
        self._attached |= word is Word.ATTACHED
