"""The four small stores. Each has a Redis and an in-memory twin under one contract suite.

Every method raises BatonError(UNAVAILABLE) where the store gives no answer in time: no caller on a
request's path may need one. A call may be cancelled at any moment; the write may then still happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.state.records import JournalEntry, JournalWrite, Listing, LoadHint, Member

# One `apply` carries at most this many changes, one lookup at most this many blocks and holders.
MAX_DELTA = 1024
MAX_LOOKUP_BLOCKS = 1024
MAX_LOOKUP_HOLDERS = 256


class Registry(Protocol):
    """Who is there. A lease of a name belongs to its newest incarnation."""

    async def announce(self, member: Member, generation: int, lease_s: float) -> int:
        """Registers `member` or renews its lease; gives its generation, to be passed from then on.

        `generation` is 0 until an announcement succeeded. Raises BatonError(CONFLICT) where a newer
        incarnation has the name.
        """

    async def withdraw(self, name: str, incarnation: str) -> None:
        """Takes the entry out if it is still this incarnation's."""

    async def listing(self) -> Listing:
        """Every member whose lease is live."""


class LoadHints(Protocol):
    """How busy each worker said it was. Hints: they correct a router's own counters, no more."""

    async def publish(self, name: str, incarnation: str, values: Mapping[str, int]) -> None:
        """Replaces the hint of `name`."""

    async def read(self) -> dict[str, LoadHint]:
        """By name, every hint younger than `keys.HINT_S`."""


class PrefixIndex(Protocol):
    """Which worker incarnation (the holder) has which blocks; a holder's entries die with it."""

    async def apply(
        self, holder: str, added: Sequence[bytes], removed: Sequence[bytes], *, fresh: bool = False
    ) -> bool:
        """Changes what `holder` has and keeps it alive; `fresh` forgets what was known before.

        False, and nothing changed, where the index does not know the holder (wiped, or lapsed): send
        everything again, the first part `fresh`. At most MAX_DELTA hashes a call.
        """

    async def longest_prefix(self, hashes: Sequence[bytes], holders: Sequence[str]) -> dict[str, int]:
        """For each of `holders` that has the first block, how many leading `hashes` it has in a row.

        One round trip; looks at the first MAX_LOOKUP_BLOCKS hashes and MAX_LOOKUP_HOLDERS holders.
        """

    async def forget(self, holder: str) -> None:
        """Drops all that is known of `holder`."""


class JournalStore(Protocol):
    """The accepted requests that have not ended, sealed. An entry's life ends with its deadline."""

    async def write(self, writes: Sequence[JournalWrite]) -> None:
        """Applies `writes` in order; doing it twice changes nothing more.

        A full store refuses appends: closes that shall free it come in a call of their own.
        """

    async def read(self, request_id: bytes) -> JournalEntry | None:
        """The open entry, or None."""

    async def open_ids(self, limit: int) -> list[bytes]:
        """At most `limit` open requests, the ones that end soonest first."""

    async def count_open(self) -> int:
        """How many requests are open."""
