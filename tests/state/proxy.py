"""A TCP proxy that makes a healthy Redis look slow, silent or gone; with TLS towards the client if asked."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Callable


class Proxy:
    """Passes bytes both ways; `delay_s` is drawn for each chunk of an answer."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.delay_s: Callable[[], float] = lambda: 0.0
        # Bytes of an answer passed on at once; 0 passes none.
        self.piece: int | None = None
        self.connections = 0
        self.port = 0

    def cut(self) -> None:
        """Ends every connection where it stands."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, back}
        for work in (self._pass(reader, back, False), self._pass(there, writer, True)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(65536):
                size = len(chunk) if self.piece is None or not answer else self.piece
                while chunk and (size or not answer):
                    if answer and (delay := self.delay_s()):
                        await asyncio.sleep(delay)
                    writer.write(chunk[:size])
                    chunk = chunk[size:]
                    await writer.drain()
        self._writers.discard(writer)
        writer.close()

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def proxy(target_port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    """A proxy on a free port before the server on `target_port`."""
    between = Proxy(target_port)
    server = await asyncio.start_server(between.serve, "127.0.0.1", 0, ssl=tls)
    between.port = server.sockets[0].getsockname()[1]
    try:
        yield between
    finally:
        server.close()
        await between.close()


def seeded_delays(seed: int) -> Callable[[], float]:
    """Mostly up to 10 ms, every tenth up to 300 ms."""
    draw = random.Random(seed)
    return lambda: draw.uniform(0, 0.3 if draw.random() < 0.1 else 0.01)
