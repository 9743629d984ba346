"""The channel between a worker's front and its engine process: length-prefixed protobuf over a socket pair.

Commands go one way, events the other. Messages are small and rare by design: the decode loop's tokens go
through the output ring instead.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from baton.base.errors import BatonError, ErrorKind
from baton.v1.engine_pb2 import EngineCommand, EngineEvent, FailedEvent

# Bounds the size of a message, and with the prompt's length the number of messages of a prefill.
PROMPT_LOGPROBS_A_MESSAGE = 256

_PREFIX = struct.Struct("<I")
_READ_BYTES = 1 << 18
# A prompt of a million tokens is about 3 MB; anything beyond this is a broken peer.
_MAX_MESSAGE = 64 << 20
_SEND_TIMEOUT = struct.pack("@ll", 10, 0)  # a struct timeval


class ChannelClosedError(BatonError):
    """The other process has ended; front and engine end together."""

    def __init__(self) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, "the worker's other process has ended")


def failed_event(error: BatonError, command_id: int = 0) -> EngineEvent:
    """Reports that a command failed, or with id 0 that the engine itself did."""
    failed = FailedEvent(kind=error.kind.value, message=error.message)  # type: ignore[arg-type]
    if error.cause is not None:
        failed.cause = error.cause.value  # type: ignore[assignment]
    return EngineEvent(id=command_id, failed=failed)


class EngineEnd:
    """The engine's end: never blocks to receive, and no longer than a deadline to send to a slow front."""

    def __init__(self, sock: socket.socket) -> None:
        # Not `settimeout`: with it Python waits in `recv` too, despite MSG_DONTWAIT.
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self._socket = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self, limit: int) -> list[EngineCommand]:
        """Returns up to `limit` whole commands that have arrived. Raises ChannelClosedError."""
        commands = self._take(limit)
        if len(commands) < limit and self._fill():
            commands += self._take(limit - len(commands))
        return commands

    def send(self, event: EngineEvent) -> None:
        """Sends an event. Raises ChannelClosedError where the front is gone or does not read within the
        deadline."""
        payload = event.SerializeToString()
        try:
            self._socket.sendall(_PREFIX.pack(len(payload)) + payload)
        except OSError as error:
            raise ChannelClosedError from error

    def _fill(self) -> bool:
        try:
            data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosedError from error
        if not data:
            raise ChannelClosedError
        self._buffer += data
        return True

    def _take(self, limit: int) -> list[EngineCommand]:
        commands: list[EngineCommand] = []
        start = 0
        while len(commands) < limit and len(self._buffer) - start >= _PREFIX.size:
            (length,) = _PREFIX.unpack_from(self._buffer, start)
            end = start + _PREFIX.size + length
            if len(self._buffer) < end:
                break
            commands.append(EngineCommand.FromString(bytes(self._buffer[start + _PREFIX.size : end])))
            start = end
        del self._buffer[:start]
        return commands


class FrontEnd:
    """The front's end; to be used within its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> FrontEnd:
        return cls(*await asyncio.open_unix_connection(sock=sock))

    async def send(self, command: EngineCommand) -> None:
        """Sends a command. Raises ChannelClosedError."""
        payload = command.SerializeToString()
        try:
            self._writer.write(_PREFIX.pack(len(payload)) + payload)
            await self._writer.drain()
        except OSError as error:
            raise ChannelClosedError from error

    async def receive(self) -> EngineEvent:
        """The next event. Raises ChannelClosedError where the engine is gone."""
        try:
            (length,) = _PREFIX.unpack(await self._reader.readexactly(_PREFIX.size))
            if length > _MAX_MESSAGE:
                raise ChannelClosedError
            return EngineEvent.FromString(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosedError from error

    def close(self) -> None:
        self._writer.close()
