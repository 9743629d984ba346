"""The socket between a front and a process of guided decoding: length-prefixed protobuf."""

from __future__ import annotations

import socket
import struct

from google.protobuf.message import Message

from baton.base.errors import BatonError, ErrorKind
from baton.v1.masks_pb2 import MaskCommand, MaskEvent
from baton.v1.types_pb2 import Failure

PREFIX = struct.Struct("<I")
# A grammar has at most 128 KiB, an output a million tokens.
MAX_FRAME = 16 << 20
_READ_BYTES = 1 << 18


def frame(message: Message) -> bytes:
    """The bytes of one message."""
    payload = message.SerializeToString()
    return PREFIX.pack(len(payload)) + payload


def failure_of(error: BatonError) -> Failure:
    """An error as the other end is told of it."""
    return Failure(kind=error.kind.value, message=error.message)  # type: ignore[arg-type]


def error_of(failure: Failure) -> BatonError:
    """The error that the other end has reported."""
    return BatonError(ErrorKind(failure.kind), failure.message)


class ProcessEnd:
    """The process's end: never blocks to receive."""

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

    def close(self) -> None:
        """Closes this process's copy of the descriptor."""
        self._socket.close()
