"""The socket between a front and its mask process: length-prefixed protobuf."""

from __future__ import annotations

import socket
import struct

from baton.v1.masks_pb2 import MaskCommand, MaskEvent

PREFIX = struct.Struct("<I")
# A grammar has at most 128 KiB, an output a million tokens.
MAX_FRAME = 16 << 20
_READ_BYTES = 1 << 18


def frame(message: MaskCommand | MaskEvent) -> bytes:
    """The bytes of one message."""
    payload = message.SerializeToString()
    return PREFIX.pack(len(payload)) + payload


class ProcessEnd:
    """The mask process's end: never blocks to receive."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, event: MaskEvent) -> None:
        """Sends an event. Raises ConnectionError where the front is gone."""
        self._socket.sendall(frame(event))

    def receive(self) -> list[MaskCommand]:
        """The whole commands that have arrived. Raises ConnectionError where the front is gone."""
        try:
            data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the front has ended")
        self._buffer += data
        commands, start = [], 0
        while len(self._buffer) - start >= PREFIX.size:
            (length,) = PREFIX.unpack_from(self._buffer, start)
            end = start + PREFIX.size + length
            if len(self._buffer) < end:
                break
            commands.append(MaskCommand.FromString(bytes(self._buffer[start + PREFIX.size : end])))
            start = end
        del self._buffer[:start]
        return commands
