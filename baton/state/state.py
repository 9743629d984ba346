"""All of Baton's soft state behind one object, with the tasks that keep it fresh.

Nothing here stands on a request's path. With Redis away, members stay known, hints grow old and the
journal waits; when it is back everything registers and publishes again by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping

import structlog

from baton.errors import BatonError, ErrorKind
from baton.state.connect import parse_url
from baton.state.connection import Connection
from baton.state.counters import Counters
from baton.state.journal import Journal
from baton.state.keys import Keys
from baton.state.lease import Lease
from baton.state.memory import (
    Memory,
    MemoryJournalStore,
    MemoryLoadHints,
    MemoryPrefixIndex,
    MemoryRegistry,
)
from baton.state.prefix_publisher import PrefixPublisher
from baton.state.records import Member
from baton.state.redis_journal import RedisJournalStore
from baton.state.redis_prefix_index import RedisPrefixIndex
from baton.state.redis_registry import RedisLoadHints, RedisRegistry
from baton.state.seal import Seal, draw_journal_key
from baton.state.stores import JournalStore, LoadHints, PrefixIndex, Registry
from baton.state.view import View

NAMESPACE = "baton"
CLOSE_S = 2.0
_AGAIN_S = 1.0

_log = structlog.get_logger(part="state")


class State:
    """`State.at(url)`, `State.open(url)` or `State.in_memory()`; then `close`. Belongs to one event loop.

    registry, load_hints, prefix_index    the stores, for whoever needs a definite answer
    journal                               accepted requests, written beside the way (to journal_store)
    lease(member), watch(), publish_prefixes(holder)    kept up until `close`
    """

    def __init__(
        self,
        registry: Registry,
        load_hints: LoadHints,
        prefix_index: PrefixIndex,
        journal_store: JournalStore,
        seal: Seal,
        counters: Counters,
        connection: Connection | None = None,
        address: str = "",
    ) -> None:
        self.registry = registry
        self.load_hints = load_hints
        self.prefix_index = prefix_index
        self.journal_store = journal_store
        self.journal = Journal(journal_store, seal, counters, time.monotonic)
        self.counters = counters
        # Where Redis is, without name and password.
        self.address = address
        self._connection = connection
        self._leases: list[Lease] = []
        self._holders: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._keep(self.journal.run)

    @classmethod
    async def open(cls, url: str, *, namespace: str = NAMESPACE, journal_key: bytes | None = None) -> State:
        """`at`, once Redis has answered or seems to be away; BatonError(UNAUTHENTICATED) where it refuses
        the password."""
        state = cls.at(url, namespace=namespace, journal_key=journal_key)
        try:
            await state.check()
        except BatonError as error:
            if error.kind is not ErrorKind.UNAVAILABLE:
                await state.close()
                raise
        return state

    @classmethod
    def at(cls, url: str, *, namespace: str = NAMESPACE, journal_key: bytes | None = None) -> State:
        """The state in the Redis at `url`, of which nothing is asked yet. Call from a running loop.

        Raises BatonError(INVALID) for a wrong URL, key or namespace. Without `journal_key` one is
        drawn: then only this `State` can read what it writes.
        """
        counters, keys, endpoint = Counters(), Keys(namespace), parse_url(url)
        seal = Seal(draw_journal_key() if journal_key is None else journal_key, namespace)
        connection = Connection(endpoint, counters)
        return cls(
            RedisRegistry(connection, keys, counters),
            RedisLoadHints(connection, keys, counters),
            RedisPrefixIndex(connection, keys),
            RedisJournalStore(connection, keys),
            seal,
            counters,
            connection,
            str(endpoint),
        )

    @classmethod
    def in_memory(cls, memory: Memory | None = None) -> State:
        """Without Redis; several may share one `memory`. Call from a running loop."""
        memory = memory or Memory()
        return cls(
            MemoryRegistry(memory),
            MemoryLoadHints(memory),
            MemoryPrefixIndex(memory),
            MemoryJournalStore(memory),
            Seal(memory.journal_key, "memory"),
            Counters(),
        )

    @property
    def away(self) -> bool:
        """Whether Redis did not answer the last call."""
        return self.away_s is not None

    @property
    def away_s(self) -> float | None:
        """For how many seconds Redis has not answered; None where it did last."""
        return self._connection.down_s if self._connection is not None else None

    async def refusal(self) -> BatonError:
        """Why Redis does not let us in, as its first answer; never returns where it does or is away."""
        try:
            await self.check()
        except BatonError as error:
            if error.kind is not ErrorKind.UNAVAILABLE:
                return error
        never: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        return await never

    async def check(self) -> None:
        """Returns once Redis answered; BatonError(UNAVAILABLE or UNAUTHENTICATED) else."""
        if self._connection is not None:
            await self._connection.ping()

    def lease(self, member: Member, load: Callable[[], Mapping[str, int]] | None = None) -> Lease:
        """Registers `member` and keeps it registered; `load` gives its hint at each renewal."""
        lease = Lease(self.registry, self.load_hints, self.counters, member, load)
        self._leases.append(lease)
        self._keep(lease.run)
        return lease

    def watch(self, on_change: Callable[[], None] | None = None) -> View:
        """Follows the registry; `on_change` is called after each change of `members`."""
        view = View(self.registry, self.counters, on_change)
        self._keep(view.run)
        return view

    def publish_prefixes(self, holder: str) -> PrefixPublisher:
        """Publishes what the incarnation `holder` tells it that it caches."""
        publisher = PrefixPublisher(self.prefix_index, self.counters, holder)
        self._holders.append(holder)
        self._keep(publisher.run)
        return publisher

    async def close(self, deadline_s: float = CLOSE_S) -> None:
        """Flushes the journal, ends the leases and all tasks, and closes every connection.

        Takes at most about twice `deadline_s`, and no more than one where Redis answers.
        """
        farewell = asyncio.create_task(self._farewell(deadline_s))
        await asyncio.wait({farewell}, timeout=deadline_s)
        farewell.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(farewell, *self._tasks, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close(deadline_s / 3)

    async def _farewell(self, deadline_s: float) -> None:
        last_words = [lease.withdraw() for lease in self._leases if not lease.withdrawn]
        last_words += [self.prefix_index.forget(holder) for holder in self._holders]
        for told in await asyncio.gather(*last_words, return_exceptions=True):
            if isinstance(told, BatonError):
                _log.info("registry_leave_failed", why=told.message)
            elif isinstance(told, BaseException):
                raise told
        if not await self.journal.flush(deadline_s):
            _log.info("journal_not_flushed", changes=self.journal.pending)

    def _keep(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._again_and_again(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again_and_again(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """A fault, ours or a callback's, is told; it ends neither a lease nor a view."""
        while True:
            try:
                return await work()
            except Exception as error:
                self.counters.tasks_failed += 1
                _log.error("state_task_failed", exc_info=error)
                await asyncio.sleep(_AGAIN_S)
