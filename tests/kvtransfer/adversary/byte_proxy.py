"""A TCP proxy in a thread of its own that cuts, delays and flips at chosen bytes of a connection.

Each connection draws one wrong for each direction, or none. A byte's number counts from the connection's
start, so a wrong may strike its settings, a header, a piece, a commit or an answer.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from dataclasses import dataclass

from tests.kvtransfer.support.wrapped import draw_kind

_START_S = 5.0
_READ = 16384


@dataclass(frozen=True, slots=True)
class Wrong:
    """A fault at byte `at` of a direction: 'cut', 'flip', 'delay' (`delay_s`), 'crumbs' or 'none'."""

    kind: str
    at: int
    bit: int = 0
    delay_s: float = 0.0


class WrongDice:
    """Draws faults by weight; early bytes as likely as late ones, over several orders of magnitude."""

    def __init__(self, seed: int, weights: dict[str, int], farthest: int) -> None:
        self._dice = random.Random(seed)
        self._weights = weights
        self._farthest = farthest

    def draw(self, struck: Counter[str]) -> Wrong:
        """Draws a fault; `struck` counts by kind those that took effect before."""
        kind = draw_kind(self._dice, self._weights, struck)
        at = int(20 * (self._farthest / 20) ** self._dice.random())
        return Wrong(kind, at, self._dice.randrange(8), self._dice.uniform(0.002, 0.08))


class ByteProxy:
    """Listens on `port`; connects each caller with `target_port`, which may change meanwhile."""

    def __init__(self, dice: WrongDice) -> None:
        self.target_port = 0
        self.port = 0
        self.connections = 0
        # Faults that took effect, by kind: written by the proxy's thread alone.
        self.struck: Counter[str] = Counter()
        self._dice = dice
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._closing = False
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="byte-proxy", daemon=True)
        self._thread.start()
        assert self._listening.wait(_START_S)

    def close(self) -> None:
        """Ends every connection, and the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        """Ends the proxy without cancelling anything: a client that connects at this time would leave a
        socket behind."""
        self._closing = True
        for writer in self._writers:
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, left = await asyncio.wait(others, timeout=_START_S)
            assert not left
        await asyncio.sleep(0.01)  # transports that were aborted close theirs

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(back)
        if self._closing:
            writer.transport.abort()
            back.transport.abort()
            return
        passing = [
            asyncio.ensure_future(self._pass(reader, back, self._dice.draw(self.struck))),
            asyncio.ensure_future(self._pass(there, writer, self._dice.draw(self.struck))),
        ]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
            for one in (writer, back):
                one.transport.abort()
                self._writers.discard(one)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wrong: Wrong) -> None:
        passed = 0
        while chunk := await reader.read(_READ):
            until = wrong.at - passed
            passed += len(chunk)
            if wrong.kind != "none" and 0 <= until < len(chunk):
                self.struck[wrong.kind] += 1
                if wrong.kind == "cut":
                    writer.write(chunk[:until])
                    await writer.drain()
                    return
                chunk = await self._wronged(chunk, until, wrong, writer)
            writer.write(chunk)
            await writer.drain()

    async def _wronged(self, chunk: bytes, at: int, wrong: Wrong, writer: asyncio.StreamWriter) -> bytes:
        """The bytes of a chunk that are still to be written after the fault."""
        if wrong.kind == "flip":
            return chunk[:at] + bytes([chunk[at] ^ 1 << wrong.bit]) + chunk[at + 1 :]
        if wrong.kind == "delay":
            writer.write(chunk[:at])
            await asyncio.sleep(wrong.delay_s)
            return chunk[at:]
        for start in range(0, min(len(chunk), 64)):  # crumbs: byte by byte
            writer.write(chunk[start : start + 1])
            await asyncio.sleep(0)
        return chunk[64:]
