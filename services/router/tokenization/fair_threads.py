"""Threads whose jobs wait in the order in which tenants share the router's queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.router.queue.entry import QueueEntry
from services.router.queue.request_order import RequestOrder
from services.router.request.request import ClientCall
from services.router.tenants.current import current_tenant

T = TypeVar("T")
# About how many bytes of text a token has; the order counts in tokens.
_BYTES_PER_TOKEN = 4


class FairThreads:
    """A few threads for the jobs of all tenants.

    While jobs wait, each tenant gets its share of the threads, by its weight and the sizes of its jobs
    (`queue.request_order`); jobs of one tenant run first come, first served. Used on one event loop. The
    caller bounds how many wait.
    """

    def __init__(self, threads: int, name: str, ahead: int = 0) -> None:
        """`ahead`: number of short jobs started beyond the number of threads, so that no thread waits for the
        event loop."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        # How many more jobs may be started.
        self._free = threads + ahead
        self._order = RequestOrder()
        self._waiting: dict[QueueEntry, asyncio.Future[None]] = {}

    async def run(self, job: Callable[[], T], size_bytes: int) -> T:
        """Runs a job of the current call's tenant. `size_bytes`: of the text that it works on.

        A job that is cancelled while it waits does not run; one that runs keeps its thread until it ends.
        """
        if self._free and not self._waiting:
            self._free -= 1
        else:
            await self._turn(max(1.0, size_bytes / _BYTES_PER_TOKEN))
        loop = asyncio.get_running_loop()
        try:
            running = self._executor.submit(job)
        except RuntimeError:  # the threads are shut down
            self._ended()
            raise
        running.add_done_callback(lambda _: _call_soon(loop, self._ended))
        return await asyncio.wrap_future(running)

    def shutdown(self, *, wait: bool) -> None:
        """Cancels the jobs that wait. `wait`: for the running one of each thread."""
        for turn in self._waiting.values():
            turn.cancel()
        self._executor.shutdown(wait=wait, cancel_futures=True)

    async def _turn(self, tokens: float) -> None:
        """Waits until a job of `tokens` tokens may be started."""
        call = ClientCall(tenant=current_tenant())
        entry = QueueEntry(call, self._order.arrival(call), tokens=tokens)
        turn = self._waiting[entry] = asyncio.get_running_loop().create_future()
        self._order.add(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn has come
                self._ended()
            elif self._waiting.pop(entry, None) is not None:
                self._order.remove(entry)
            raise

    def _ended(self) -> None:
        """A job has ended, or is not started after all: the next ones have their turn."""
        self._free += 1
        while self._free and self._waiting:
            entry = next(self._order.walk())
            turn = self._waiting.pop(entry)
            if turn.cancelled():
                self._order.remove(entry)
                continue
            self._order.placed(entry, entry.tokens)
            self._free -= 1
            turn.set_result(None)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(callback)
