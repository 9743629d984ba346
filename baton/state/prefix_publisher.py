"""Tells the prefix index what this worker's cache holds, beside the way.

It keeps the wanted state, not a queue: what could not be sent stays to be sent, twice the same block
is one change, and an index that was wiped gets everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice

from baton.errors import BatonError
from baton.state.counters import Counters
from baton.state.keys import PREFIX_TOUCH_S
from baton.state.stores import MAX_DELTA, PrefixIndex

# Changes gather for this long.
_GATHER_S = 0.1
_AGAIN_S = 0.5
# Blocks of one holder that the index takes; the others are just not advertised.
MAX_BLOCKS = 262_144


class PrefixPublisher:
    """The blocks that `holder` (an incarnation) has; `add` and `remove` return at once."""

    def __init__(
        self, index: PrefixIndex, counters: Counters, holder: str, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._index = index
        self._counters = counters
        self._holder = holder
        self._max_blocks = max_blocks
        self._held: dict[bytes, None] = {}
        # hash -> whether the index shall have it; at most what is held, was held, or both.
        self._unsent: dict[bytes, bool] = {}
        # The next change sent begins a new set.
        self._fresh = True
        self._wake = asyncio.Event()

    @property
    def unsent(self) -> int:
        """Changes that the index has not seen yet."""
        return len(self._unsent)

    def add(self, hashes: Iterable[bytes]) -> None:
        """These blocks are in the cache now."""
        for one in hashes:
            if one in self._held:
                continue
            if len(self._held) >= self._max_blocks:
                self._counters.prefix_blocks_refused += 1
                continue
            self._held[one] = None
            self._unsent[one] = True
        self._wake.set()

    def remove(self, hashes: Iterable[bytes]) -> None:
        """These blocks were evicted."""
        for one in hashes:
            if one in self._held:
                del self._held[one]
                self._unsent[one] = False
        self._wake.set()
        if len(self._unsent) > 2 * self._max_blocks:
            self._start_over()  # the index is away, and more has changed than there is

    async def run(self) -> None:
        """Sends changes as they come, and a touch where none come; owned by `State`."""
        while True:
            self._wake.clear()
            sent = await self._send()
            await asyncio.sleep(_GATHER_S if sent else _AGAIN_S)
            if sent and not self._unsent and not self._fresh:
                await self._idle()

    async def _idle(self) -> None:
        try:
            async with asyncio.timeout(PREFIX_TOUCH_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _start_over(self) -> None:
        self._fresh = True
        self._unsent = dict.fromkeys(self._held, True)

    async def _send(self) -> bool:
        fresh, self._fresh = self._fresh, False
        batch = dict(islice(self._unsent.items(), MAX_DELTA))
        added = [one for one, held in batch.items() if held]
        removed = [one for one, held in batch.items() if not held]
        try:
            known = await self._index.apply(self._holder, added, removed, fresh=fresh)
        except BatonError:
            self._counters.prefix_publishes_failed += 1
            self._fresh |= fresh
            return False
        if not known:
            self._counters.prefix_resyncs += 1
            self._start_over()
        if not self._fresh:  # else all is sent once more
            for one, held in batch.items():
                if self._unsent.get(one) is held:
                    del self._unsent[one]
        return True
