"""The router's use of the state store: it finds registered workers there and writes its journal to it.

Without a configured store there is no registry and no journal; everything else works the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from baton.base.api_keys import ApiKey
from baton.base.errors import BatonError, ErrorKind
from baton.state import Journal, Member, State
from baton.state.key_view import KeyView
from baton.state.stores.protocols import Quotas
from baton.v1.admin_pb2 import StoreStatus
from services.common.config.router import ResponseStorage
from services.common.config.state import StateConfig
from services.router.conversations.stored_responses import StoredResponses

# At shutdown, the time to write pending journal entries, if Redis is available.
_CLOSE_S = 0.5
# The longest that a status call waits for the count of open requests.
_COUNT_S = 1.0


class Store:
    """The state store of a router, constructed on a running event loop; `close` ends it. BatonError(INVALID)
    if the URL is invalid, or responses are to be stored where they could not be read again."""

    def __init__(
        self, config: StateConfig | None, storage: ResponseStorage | None = None, max_body_bytes: int = 0
    ) -> None:
        """`storage`: whether and how responses are stored, where bodies of requests have at most
        `max_body_bytes`; None: they are not."""
        self._config = config
        key = bytes.fromhex(config.journal_key) if config and config.journal_key else None
        self.state = (
            State.at(
                config.redis_url or "",
                namespace=config.namespace or "",
                journal_key=key,
                url_file=config.redis_url_file,
            )
            if config
            else None
        )
        # Of one with the conversation before it; 0: none are stored.
        self.most_response_bytes = storage.most_bytes(max_body_bytes) if storage else 0
        self.responses = self._stored_responses(storage) if storage and storage.ttl_s else None
        # How often the parent has restarted the embedded server.
        self.restarts = 0
        self._members: Callable[[], Mapping[str, Member]] = dict

    @property
    def journal(self) -> Journal | None:
        """The journal of admitted requests."""
        return self.state.journal if self.state else None

    @property
    def quotas(self) -> Quotas | None:
        """The remainders of tenants' limits, which routers share; None without a store."""
        return self.state.quotas if self.state else None

    @property
    def registered_workers(self) -> int:
        """Workers in the registry when it was last read."""
        return sum(member.role != "router" for member in self._members().values())

    def watch(self, on_members: Callable[[Mapping[str, Member]], None]) -> None:
        """Calls `on_members` with all members after each change."""
        if self.state is not None:
            view = self.state.watch(lambda: on_members(view.members))
            self._members = lambda: view.members

    def watch_api_keys(
        self, cluster_secret: str, on_change: Callable[[list[ApiKey], list[ApiKey]], None]
    ) -> KeyView:
        """Polls the API keys in Redis; only with a configured store."""
        assert self.state is not None
        return self.state.watch_api_keys(cluster_secret, on_change)

    async def refusal(self) -> BatonError:
        """Returns the error with which Redis refuses access; never returns if it does not, or is
        unavailable."""
        if self.state is not None:
            return await self.state.refusal()
        never: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        return await never

    async def status(self) -> StoreStatus | None:
        """The store's status for operators; waits shortly for Redis if it is available."""
        if self.state is None or self._config is None:
            return None
        return StoreStatus(
            address=self.state.address,
            namespace=self._config.namespace or "",
            embedded=self._config.embedded,
            restarts=self.restarts,
            journal_open=await self._open(self.state.journal),
            unavailable_s=self.state.unavailable_s,
            registered_workers=self.registered_workers,
            journal_pending=self.state.journal.pending,
            journal_dropped=self.state.counters.journal_dropped,
        )

    def _stored_responses(self, storage: ResponseStorage) -> StoredResponses:
        if self.state is None or self._config is None:
            raise BatonError(
                ErrorKind.INVALID, "router.stored_responses.ttl_s needs Redis: set state.redis_url"
            )
        if not self._config.journal_key:
            message = (
                "router.stored_responses.ttl_s needs state.journal_key_file, which encrypts the responses"
            )
            raise BatonError(ErrorKind.INVALID, message)
        return StoredResponses(self.state.responses, storage, self.most_response_bytes)

    async def _open(self, journal: Journal) -> int | None:
        try:
            async with asyncio.timeout(_COUNT_S):
                return await journal.count_open()
        except (BatonError, TimeoutError):
            return None

    async def close(self) -> None:
        """Writes what is pending, if Redis answers at once."""
        if self.responses is not None:
            await self.responses.close(_CLOSE_S)
        if self.state is not None:
            await self.state.close(_CLOSE_S)
