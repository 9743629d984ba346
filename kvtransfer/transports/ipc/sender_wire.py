"""The sender's end of an ipc link through host memory."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

import numpy as np

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.protocol.frames import (
    FrameError,
    Piece,
    ReceiverFrame,
    decode_from_receiver,
    encode_piece_header,
)
from kvtransfer.transports.ipc.control import Control, ControlByte
from kvtransfer.transports.ipc.memory import LinkMemory
from kvtransfer.transports.ipc.wire import IpcWire

_LOG = logging.getLogger(__name__)


class IpcSenderWire(IpcWire):
    """The `SenderWire` of an ipc link whose blocks are in host memory."""

    on_device = False
    shares_clock = True

    def __init__(
        self,
        sock: socket.socket,
        memory: LinkMemory,
        response: OpenLinkResponse,
        wake: Callable[[], None],
        *,
        between_devices: bool = False,
    ) -> None:
        rings = memory.sender_rings(response.window_pieces)
        super().__init__(rings, wake, "receiver", between_devices=between_devices)
        self.memory = memory
        self._pieces = response.window_pieces
        self._piece_bytes = response.piece_bytes
        self.control = Control(sock)
        self.control.send(ControlByte.ATTACHED)
        threading.Thread(target=self._wait, args=(self.control,), name="link-control", daemon=True).start()

    def put(self, piece: Piece, payload: memoryview) -> None:
        if self._closed or self._broken is not None:
            return
        if piece.staging < self._pieces:  # the receiver reports an index outside the window
            start = piece.staging * self._piece_bytes
            source = np.frombuffer(payload, dtype=np.uint8)
            self.memory.window[start : start + len(source)] = source
        self._add(encode_piece_header(piece))

    def receive(self) -> ReceiverFrame | None:
        message = self._take()
        try:
            return None if message is None else decode_from_receiver(message)
        except FrameError as malformed:
            self._malformed(malformed)
            return None

    def close(self) -> None:
        """Unmaps the window, and only then reports it: afterwards it is the receiver's alone."""
        if self._closed:
            return
        self._closed = True
        self._break(BatonError(ErrorKind.UNAVAILABLE, "the sender closed the link"))
        self._reader.close()
        self._writer.close()
        assert self.control is not None
        try:
            self._release_device()
            self.memory.unmap()
        except (BufferError, RuntimeError):  # a view is open, or CUDA fails: the end of the process proves it
            _LOG.exception("staging_unmap_failed")
        else:
            self.control.send(ControlByte.UNMAPPED)
        self.control.end()
        self.control.release()

    def _release_device(self) -> None:
        """Releases what else this end has of the receiver's."""

    def _wait(self, control: Control) -> None:
        self._wait_for_end(control)
        control.release()
