"""All soft state behind one object, with the background tasks that update it.

Nothing here is on a request's path. While Redis is unavailable, members stay known and the journal is
buffered; when it returns everything registers and publishes again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from baton.base.api_keys import ApiKey
from baton.base.cluster_auth import KeyProof
from baton.base.errors import BatonError, ErrorKind
from baton.base.followed_file import FollowedFile
from baton.base.structured_logs import structlog
from baton.state.client.connect import Endpoint, parse_url
from baton.state.client.connection import Connection
from baton.state.client.counters import Counters
from baton.state.journal import Journal
from baton.state.key_view import KeyView
from baton.state.lease import Lease
from baton.state.prefix_publisher import PrefixPublisher
from baton.state.stores.key_names import Keys
from baton.state.stores.protocols import JournalStore, PrefixIndex, Quotas, Registry, ResponseStore
from baton.state.stores.records import Member
from baton.state.stores.redis_api_keys import RedisKeyStore
from baton.state.stores.redis_journal import RedisJournalStore
from baton.state.stores.redis_prefix_index import RedisPrefixIndex
from baton.state.stores.redis_quotas import RedisQuotas
from baton.state.stores.redis_registry import RedisRegistry
from baton.state.stores.redis_responses import RedisResponses
from baton.state.stores.response_seal import ResponseSeal
from baton.state.stores.seal import Seal, new_journal_key
from baton.state.view import View

NAMESPACE = "baton"
CLOSE_S = 2.0
_RETRY_S = 1.0

_log = structlog.get_logger(part="state")


class State:
    """`State.at(url)`; then `close`. Belongs to one event loop.

    registry, prefix_index                the stores, for direct calls
    journal                               accepted requests, written in the background (to journal_store)
    quotas                                what is left of tenants' limits
    responses                             stored responses
    api_keys(secret)                      the API keys, for direct calls
    lease(member), watch(), watch_api_keys(secret), publish_prefixes(holder)    run until `close`
    """

    def __init__(
        self,
        registry: Registry,
        prefix_index: PrefixIndex,
        journal_store: JournalStore,
        seal: Seal,
        counters: Counters,
        connection: Connection | None = None,
        address: str = "",
        keys: Keys | None = None,
        response_seal: ResponseSeal | None = None,
    ) -> None:
        self.registry = registry
        self.prefix_index = prefix_index
        self.journal_store = journal_store
        self.journal = Journal(journal_store, seal, counters, time.monotonic)
        self.counters = counters
        # host:port of Redis, without user name and password.
        self.address = address
        self._connection = connection
        self._keys = keys
        self._response_seal = response_seal
        self._leases: list[Lease] = []
        self._holders: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_task(self.journal.run)

    @classmethod
    def at(
        cls,
        url: str,
        *,
        namespace: str = NAMESPACE,
        journal_key: bytes | None = None,
        url_file: Path | None = None,
    ) -> State:
        """The state in the Redis at `url`, without connecting yet. Call from a running loop.

        `url_file`: a file with the URL, which is followed: read again where Redis refuses the credentials or
        cannot be reached, and every 10 s at the most.

        Raises BatonError(INVALID) for a wrong URL, key or namespace. Without `journal_key` a random one is
        used, and only this `State` can read what it writes.
        """
        counters, keys, endpoint = Counters(), Keys(namespace), parse_url(url)
        key = new_journal_key() if journal_key is None else journal_key
        seal = Seal(key, namespace)
        followed = FollowedFile(url_file, "redis_url_file", _endpoint_of) if url_file else None
        connection = Connection(followed.value if followed else endpoint, counters, followed=followed)
        return cls(
            RedisRegistry(connection, keys, counters),
            RedisPrefixIndex(connection, keys),
            RedisJournalStore(connection, keys),
            seal,
            counters,
            connection,
            str(endpoint),
            keys,
            ResponseSeal(key, namespace),
        )

    @property
    def unavailable(self) -> bool:
        """True if Redis did not answer the last call."""
        return self.unavailable_s is not None

    @property
    def unavailable_s(self) -> float | None:
        """Seconds since Redis stopped answering; None if it answered the last call."""
        return self._connection.down_s if self._connection is not None else None

    async def refusal(self) -> BatonError:
        """Returns the error if Redis refuses the credentials; never returns if it accepts them, or cannot
        serve for any other reason, which may end."""
        try:
            await self.check()
        except BatonError as error:
            if error.kind is ErrorKind.UNAUTHENTICATED:
                return error
        never: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        return await never

    async def check(self) -> None:
        """Returns once Redis has answered; else raises BatonError(UNAVAILABLE or UNAUTHENTICATED)."""
        if self._connection is not None:
            await self._connection.ping()

    def lease(self, member: Member) -> Lease:
        """Registers `member` and keeps it registered until `close`."""
        lease = Lease(self.registry, self.counters, member)
        self._leases.append(lease)
        self._start_task(lease.run)
        return lease

    def watch(self, on_change: Callable[[], None] | None = None) -> View:
        """Polls the registry until `close`; `on_change` is called after each change of `members`."""
        view = View(self.registry, on_change)
        self._start_task(view.run)
        return view

    def api_keys(self, cluster_secret: str) -> RedisKeyStore:
        """The API keys in this Redis, which are signed with a key of the cluster's secret."""
        assert self._connection is not None  # made by `at`
        assert self._keys is not None
        return RedisKeyStore(self._connection, self._keys, KeyProof(cluster_secret, self._keys.namespace))

    def watch_api_keys(
        self, cluster_secret: str, on_change: Callable[[list[ApiKey], list[ApiKey]], None] | None = None
    ) -> KeyView:
        """Polls the API keys until `close`; see `KeyView`."""
        view = KeyView(self.api_keys(cluster_secret), on_change)
        self._start_task(view.run)
        return view

    @property
    def quotas(self) -> Quotas:
        """The remainders of tenants' limits, for direct calls in the background."""
        assert self._connection is not None  # made by `at`
        assert self._keys is not None
        return RedisQuotas(self._connection, self._keys)

    @property
    def responses(self) -> ResponseStore:
        """The stored responses, for direct calls."""
        assert self._connection is not None  # made by `at`
        assert self._keys is not None
        assert self._response_seal is not None
        return RedisResponses(self._connection, self._keys, self._response_seal)

    def publish_prefixes(self, holder: str) -> PrefixPublisher:
        """Publishes the cached blocks of the incarnation `holder` until `close`."""
        publisher = PrefixPublisher(self.prefix_index, self.counters, holder)
        self._holders.append(holder)
        self._start_task(publisher.run)
        return publisher

    async def close(self, deadline_s: float = CLOSE_S) -> None:
        """Flushes the journal, ends the leases and all tasks, and closes every connection.

        Takes at most about twice `deadline_s`, and no more than one where Redis answers.
        """
        leaving = asyncio.create_task(self._leave(deadline_s))
        await asyncio.wait({leaving}, timeout=deadline_s)
        leaving.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(leaving, *self._tasks, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close(deadline_s / 3)

    async def _leave(self, deadline_s: float) -> None:
        withdrawals = [lease.withdraw() for lease in self._leases if not lease.withdrawn]
        withdrawals += [self.prefix_index.forget(holder) for holder in self._holders]
        for failure in await asyncio.gather(*withdrawals, return_exceptions=True):
            if isinstance(failure, BatonError):
                _log.info("registry_leave_failed", reason=failure.message)
            elif isinstance(failure, BaseException):
                raise failure
        if not await self.journal.flush(deadline_s):
            _log.info("journal_not_flushed", changes=self.journal.pending)

    def _start_task(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._restart_on_error(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart_on_error(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Logs an exception of the task or its callback, and restarts the task."""
        while True:
            try:
                return await work()
            except Exception as error:
                self.counters.tasks_failed += 1
                _log.error("state_task_failed", exc_info=error)
                await asyncio.sleep(_RETRY_S)


def _endpoint_of(text: str) -> Endpoint:
    """The endpoint of a file with a URL, which may end with a newline."""
    return parse_url(text.strip())
