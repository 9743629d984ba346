"""Stores in memory with the behaviour of the Redis ones, under the same contract suite."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.base.errors import BatonError, ErrorKind, NameTakenError
from baton.state.client.counters import Counters
from baton.state.state import State
from baton.state.stores.key_names import FORGET_MEMBER_S, PREFIX_S
from baton.state.stores.protocols import MAX_DELTA, MAX_LOOKUP_BLOCKS, MAX_LOOKUP_HOLDERS
from baton.state.stores.records import JournalWrite, Kept, Listed, Listing, Member
from baton.state.stores.seal import new_journal_key
from tests.state.journal_reader import JournalEntry, ReadableSeal, readable


@dataclass
class Memory:
    """The contents of the in-memory stores. `unavailable` makes every call fail, `wipe` deletes
    everything."""

    clock: Callable[[], float] = time.monotonic
    unavailable: bool = False
    journal_key: bytes = field(default_factory=new_journal_key, repr=False)
    epoch: str = ""
    # name -> (member, generation, end of lease)
    members: dict[str, tuple[Listed, float]] = field(default_factory=dict)
    # name -> incarnation that keeps it
    keepers: dict[str, str] = field(default_factory=dict)
    # holder -> (hashes, end)
    held: dict[str, tuple[set[bytes], float]] = field(default_factory=dict)
    # request id -> (entry, end)
    journal: dict[bytes, tuple[JournalEntry, float]] = field(default_factory=dict)

    def now(self) -> float:
        """The time in seconds. Raises BatonError(UNAVAILABLE) while `unavailable`."""
        if self.unavailable:
            raise BatonError(ErrorKind.UNAVAILABLE, "the in-memory store is unavailable")
        return self.clock()

    def wipe(self) -> None:
        """Deletes everything, like a restart of Redis."""
        self.epoch = ""
        for store in (self.members, self.keepers, self.held, self.journal):
            store.clear()


class MemoryRegistry:
    """The store `stores.Registry`, kept in memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    async def announce(self, member: Member, generation: int, lease_s: float) -> int:
        now = self._memory.now()
        fresh = int(now * 1e6) + 1
        known = self._memory.members.get(member.name)
        if known is None:
            generation = generation or fresh
        elif known[0].member.incarnation == member.incarnation:
            generation = max(generation, known[0].generation)
        elif generation == 0:
            if await self.keeper(member.name) is not None:
                raise _taken(known[0].member, kept=True)
            generation = max(fresh, known[0].generation + 1)
        elif generation < known[0].generation:
            if not member.draining:
                self._memory.keepers[member.name] = known[0].member.incarnation
            raise _taken(known[0].member, kept=False)
        members = self._memory.members
        for name in [name for name, (_, end) in members.items() if end <= now - FORGET_MEMBER_S]:
            del members[name]
        self._memory.epoch = self._memory.epoch or uuid.uuid4().hex
        members[member.name] = (Listed(member, generation), now + lease_s)
        return generation

    async def keeper(self, name: str) -> Kept | None:
        now = self._memory.now()
        known, end = self._memory.members.get(name, (None, 0.0))
        if known is None or end <= now or known.member.draining:
            return None
        kept = self._memory.keepers.get(name) == known.member.incarnation
        return Kept(known.member, round(end * 1000)) if kept else None

    async def withdraw(self, name: str, incarnation: str) -> None:
        self._memory.now()
        known = self._memory.members.get(name)
        if known is not None and known[0].member.incarnation == incarnation:
            del self._memory.members[name]

    async def listing(self) -> Listing:
        now = self._memory.now()
        live = (listed for listed, end in self._memory.members.values() if end > now)
        return Listing(self._memory.epoch, tuple(live))


def _taken(by: Member, *, kept: bool) -> NameTakenError:
    return NameTakenError(by.name, by.host, by.addresses.get("grpc", ""), kept=kept)


class MemoryPrefixIndex:
    """The store `stores.PrefixIndex`, kept in memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def _held(self, holder: str) -> set[bytes] | None:
        held, end = self._memory.held.get(holder, (None, 0.0))
        return held if end > self._memory.now() else None

    async def apply(
        self, holder: str, added: Sequence[bytes], removed: Sequence[bytes], *, fresh: bool = False
    ) -> bool:
        if len(added) + len(removed) > MAX_DELTA:
            raise BatonError(ErrorKind.INVALID, f"more than {MAX_DELTA} changes of the prefix index")
        now = self._memory.now()
        held = set() if fresh else self._held(holder)
        if held is None:
            return False
        held |= set(added)
        held -= set(removed)
        self._memory.held[holder] = (held, now + PREFIX_S)
        return True

    async def longest_prefix(self, hashes: Sequence[bytes], holders: Sequence[str]) -> dict[str, int]:
        self._memory.now()
        found = {}
        for holder in list(dict.fromkeys(holders))[:MAX_LOOKUP_HOLDERS]:
            held = self._held(holder) or set()
            looked = hashes[:MAX_LOOKUP_BLOCKS]
            count = next((i for i, one in enumerate(looked) if one not in held), len(looked))
            if count:
                found[holder] = count
        return found

    async def forget(self, holder: str) -> None:
        self._memory.now()
        self._memory.held.pop(holder, None)


class MemoryJournalStore:
    """The store `stores.JournalStore`, kept in memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def _open(self) -> dict[bytes, tuple[JournalEntry, float]]:
        now, journal = self._memory.now(), self._memory.journal
        for request_id in [one for one, (_, end) in journal.items() if end <= now]:
            del journal[request_id]
        return journal

    async def write(self, writes: Sequence[JournalWrite]) -> None:
        entries = self._open()
        for one in writes:
            known = entries.get(one.request_id)
            if one.action == "append":
                entry = JournalEntry(one.body, one.attempt)
                entries[one.request_id] = (entry, self._memory.now() + one.ttl_s)
            elif one.action == "close":
                entries.pop(one.request_id, None)
            elif known is not None and known[0].attempt < one.attempt:
                entries[one.request_id] = (JournalEntry(known[0].body, one.attempt), known[1])

    async def read(self, request_id: bytes) -> JournalEntry | None:
        entry, _ = self._open().get(request_id, (None, 0.0))
        return entry

    async def open_ids(self) -> list[bytes]:
        ordered = sorted(self._open().items(), key=lambda item: item[1][1])
        return [request_id for request_id, _ in ordered]

    async def count_open(self) -> int:
        return len(self._open())


def memory_state(memory: Memory | None = None) -> State:
    """State without Redis; several may share one `memory`. Call from a running loop."""
    memory = memory or Memory()
    with readable():
        return State(
            MemoryRegistry(memory),
            MemoryPrefixIndex(memory),
            MemoryJournalStore(memory),
            ReadableSeal(memory.journal_key, "memory"),
            Counters(),
        )
