"""A TCP proxy before a worker that swallows bytes while its sockets stay open, or cuts every connection."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

_START_S = 10.0
_READ = 1 << 16


class WireProxy:
    """Connects each caller of `address` with the target, in a thread of its own.

    `swallow_requests` and `swallow_answers` discard what is read in that direction, on old and new
    connections alike: every byte is acknowledged by TCP and none arrives, as on a half-open connection.
    `swallowed` counts the bytes, so that a test can show that the fault took effect.
    """

    def __init__(self, target: str) -> None:
        self._target_port = int(target.rpartition(":")[2])
        self.address = ""
        self.swallow_requests = False
        self.swallow_answers = False
        self.swallowed = 0
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wire-proxy", daemon=True)
        self._thread.start()
        assert self._listening.wait(_START_S)

    def swallow(self, *, requests: bool, answers: bool) -> None:
        """Sets what is discarded from now on."""
        self.swallow_requests, self.swallow_answers = requests, answers

    def retarget(self, target: str) -> None:
        """New connections go to another address: the worker's, once it was started again."""
        self._target_port = int(target.rpartition(":")[2])

    def cut(self) -> None:
        """Resets every connection. New ones are served."""
        self._loop.call_soon_threadsafe(self._abort)

    def close(self) -> None:
        """Ends every connection, and the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        self._loop.run_forever()
        server.close()
        self._abort()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.01)  # aborted transports close their sockets

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, back}
        self._writers |= both
        try:
            ways = (
                asyncio.ensure_future(self._pass(reader, back, lambda: self.swallow_requests)),
                asyncio.ensure_future(self._pass(there, writer, lambda: self.swallow_answers)),
            )
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            for one in both:
                one.transport.abort()
            self._writers -= both

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallows: Callable[[], bool]
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(_READ):
                if swallows():
                    self.swallowed += len(chunk)
                    continue
                writer.write(chunk)
                await writer.drain()


@contextlib.contextmanager
def wire_proxies() -> Iterator[Callable[[str], WireProxy]]:
    """Makes proxies before addresses, and closes them at the end."""
    made: list[WireProxy] = []

    def make(target: str) -> WireProxy:
        made.append(WireProxy(target))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()
