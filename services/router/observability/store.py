"""This router's side of Redis: it finds registered workers there, and keeps its journal in it.

Without a configuration there is neither, and nothing else differs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.errors import BatonError
from baton.state import State
from baton.v1.admin_pb2 import StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from baton.state import Journal, Member
    from services.common.config.state import StateConfig

# At a stop: for the last entries to be closed, where Redis is there to hear it.
_CLOSE_S = 0.5
# An operator who asks does not wait longer for the count of open requests.
_COUNT_S = 1.0


class Store:
    """Make it from a running loop; then `close`. BatonError(INVALID) where the URL is wrong."""

    def __init__(self, config: StateConfig | None) -> None:
        self._config = config
        key = bytes.fromhex(config.journal_key) if config and config.journal_key else None
        self.state = (
            State.at(config.redis_url, namespace=config.namespace, journal_key=key) if config else None
        )
        # How often the parent has started the embedded server again, as it told us.
        self.restarts = 0
        self._members: Callable[[], Mapping[str, Member]] = dict

    @property
    def journal(self) -> Journal | None:
        """Where accepted requests are written."""
        return self.state.journal if self.state else None

    @property
    def registered_workers(self) -> int:
        """As the registry was last seen."""
        return sum(member.role != "router" for member in self._members().values())

    def watch(self, on_members: Callable[[Mapping[str, Member]], None]) -> None:
        """Calls back with all members after each change."""
        if self.state is not None:
            view = self.state.watch(lambda: on_members(view.members))
            self._members = lambda: view.members

    async def refusal(self) -> BatonError:
        """Why Redis does not let us in; never returns where it does, or is away."""
        if self.state is not None:
            return await self.state.refusal()
        never: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        return await never

    async def status(self) -> StoreStatus | None:
        """For operators; waits a moment for Redis, where it is there."""
        if self.state is None or self._config is None:
            return None
        return StoreStatus(
            address=self.state.address,
            namespace=self._config.namespace,
            embedded=self._config.embedded,
            restarts=self.restarts,
            journal_open=await self._open(self.state.journal),
            unavailable_s=self.state.away_s,
            registered_workers=self.registered_workers,
            journal_pending=self.state.journal.pending,
            journal_dropped=self.state.counters.journal_dropped,
        )

    async def _open(self, journal: Journal) -> int | None:
        try:
            async with asyncio.timeout(_COUNT_S):
                return await journal.count_open()
        except (BatonError, TimeoutError):
            return None

    async def close(self) -> None:
        """Has Redis told what is pending, where it answers at once."""
        if self.state is not None:
            await self.state.close(_CLOSE_S)
