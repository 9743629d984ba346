"""Protocols of the stores. Each has a Redis implementation, and one in memory for tests, under one
contract suite.

Every method raises BatonError(UNAVAILABLE) where the store does not answer in time, so none may be called on
a request's path, except for what the request itself refers to. A call may be cancelled at any time; its write
may then still happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.state.stores.records import JournalWrite, Kept, Listing, Member, QuotaAsk, Rebalance

# Most changes of one `apply`, and most blocks and holders of one lookup.
MAX_DELTA = 1024
MAX_LOOKUP_BLOCKS = 1024
MAX_LOOKUP_HOLDERS = 256
MAX_REBALANCED = 64


class Registry(Protocol):
    """Live members. The lease of a name belongs to its newest incarnation.

    A newer start takes the name from a worker that lives, once: where that one learns of it, the newer start
    keeps the name as long as its lease is live and it does not drain. Otherwise two workers of one name, each
    restarted whenever it ends, would take turns for ever.
    """

    async def announce(self, member: Member, generation: int, lease_s: float) -> int:
        """Registers `member` or renews its lease; returns its generation, to be passed from then on.

        `generation` is 0 until an announcement succeeded. Raises NameTakenError where a newer incarnation
        has the name, or another one keeps it.
        """

    async def keeper(self, name: str) -> Kept | None:
        """The member that keeps `name` from a new start; None where that may take it."""

    async def withdraw(self, name: str, incarnation: str) -> None:
        """Removes the entry if it still belongs to this incarnation."""

    async def listing(self) -> Listing:
        """Every member whose lease is live."""


class PrefixIndex(Protocol):
    """The cached blocks of each worker incarnation (the holder); they expire with it."""

    async def apply(
        self, holder: str, added: Sequence[bytes], removed: Sequence[bytes], *, fresh: bool = False
    ) -> bool:
        """Changes the blocks of `holder` and renews its lifetime; `fresh` first removes all its blocks.

        Returns False without a change where the holder is unknown (wiped or expired): send everything again,
        the first part with `fresh`. At most MAX_DELTA hashes per call.
        """

    async def longest_prefix(self, hashes: Sequence[bytes], holders: Sequence[str]) -> dict[str, int]:
        """The number of leading `hashes` that each of `holders` has, for those that have the first one.

        One round trip; limited to the first MAX_LOOKUP_BLOCKS hashes and MAX_LOOKUP_HOLDERS holders.
        """

    async def forget(self, holder: str) -> None:
        """Removes all blocks of `holder`."""


class Quotas(Protocol):
    """The remainders of the tenants' limits, of which routers hold leases: each judges calls by what it
    holds, and rebalances its leases in the background."""

    async def rebalance(self, router: str, asks: Sequence[QuotaAsk], known: int = 1) -> Rebalance:
        """Reports what a router holds of some tenants' limits, and changes it to what it may hold now.

        A limit of a minute is a bucket that is full at first. All that routers hold and what is left is never
        more than one minute's amount. A router gets half of an equal share of it, all if it is alone, and
        more if it wants more and more is left. Routers together never hold more slots than there are.
        `known`: the number of routers by the last answer; a store that has lost its memory shares by that. At
        most MAX_REBALANCED tenants per call.
        """

    async def withdraw(self, router: str) -> None:
        """Ends a router's leases: what it held by its last rebalance is free again."""


class ResponseStore(Protocol):
    """Responses that clients continue later, each under its tenant and id; it expires by itself.

    Neither a tenant's name nor an id has a blank or a brace in it.
    """

    async def put(self, tenant: str, response_id: str, record: bytes, ttl_s: float, most_bytes: int) -> None:
        """Stores a record for `ttl_s`, in place of an earlier one with this id. Deletes the tenant's oldest
        where all of its records have more than `most_bytes`."""

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """The record; None if the tenant has none with this id that this store can read."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Removes a record; returns whether there was one."""


class JournalStore(Protocol):
    """Sealed entries of accepted requests that have not ended; an entry expires with its deadline."""

    async def write(self, writes: Sequence[JournalWrite]) -> None:
        """Applies `writes` in order; idempotent.

        A store with full memory refuses appends, so closes that free memory must be in a call of their own.
        """

    async def count_open(self) -> int:
        """The number of open requests."""
