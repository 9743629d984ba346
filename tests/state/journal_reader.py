"""Reads the journal, as a router that resumes requests would; production only writes it."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.base.errors import BatonError, ErrorKind
from baton.state import JournalRecord, State
from baton.state import state as state_module
from baton.state.client.connection import NOW, Connection
from baton.state.journal import Journal
from baton.state.stores.key_names import Keys
from baton.state.stores.redis_journal import RedisJournalStore
from baton.state.stores.seal import Seal

_NONCE = slice(1, 13)
_OPEN = NOW + "return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')"
_READ = "return redis.call('HMGET', KEYS[1], 'body', 'attempt')"


@dataclass(frozen=True)
class JournalEntry:
    """A stored entry with its sealed body."""

    body: bytes
    attempt: int


class ReadableSeal(Seal):
    """A seal that opens what it has sealed."""

    def __init__(self, key: bytes, namespace: str) -> None:
        super().__init__(key, namespace)
        self.opener = AESGCM(key)
        self.prefix = b"\x01baton journal " + namespace.encode() + b" "

    def unseal(self, request_id: bytes, sealed: bytes) -> tuple[str, tuple[int, ...], bytes]:
        """Decrypts an entry into tenant, token ids and details. Raises BatonError(INTERNAL) where the key or
        the request id is wrong."""
        try:
            if sealed[:1] != b"\x01":
                raise ValueError  # of another version
            plain = self.opener.decrypt(sealed[_NONCE], sealed[_NONCE.stop :], self.prefix + request_id)
        except (InvalidTag, ValueError) as error:
            raise BatonError(ErrorKind.INTERNAL, "a journal entry cannot be opened with this key") from error
        name_bytes, details_bytes = struct.unpack_from("<II", plain)
        tenant, rest = plain[8 : 8 + name_bytes], plain[8 + name_bytes :]
        details, ids = rest[:details_bytes], rest[details_bytes:]
        return tenant.decode(), struct.unpack(f"<{len(ids) // 4}I", ids), details


class ReadableStore(RedisJournalStore):
    """A journal in Redis that is read, too."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        super().__init__(connection, keys)
        self.connection, self.keys = connection, keys

    async def read(self, request_id: bytes) -> JournalEntry | None:
        """The open entry, or None."""
        reply: Any = await self.connection.script(_READ, [self.keys.journal_entry(request_id)])
        return None if reply[0] is None else JournalEntry(reply[0], int(reply[1]))

    async def open_ids(self) -> list[bytes]:
        """The ids of open requests, those that expire soonest first."""
        reply: Any = await self.connection.script(_OPEN, [self.keys.journal_open])
        return list(reply)


class ReadableJournal(Journal):
    """A journal whose store and seal are readable."""

    def __init__(self, store: Any, seal: Seal, *arguments: Any, **settings: Any) -> None:
        super().__init__(store, seal, *arguments, **settings)
        assert isinstance(seal, ReadableSeal)
        self.store, self.seal = store, seal

    async def read(self, request_id: bytes) -> JournalRecord | None:
        """The open request or None. Raises BatonError(INTERNAL) where it was sealed with another key."""
        entry = await self.store.read(request_id)
        if entry is None:
            return None
        tenant, token_ids, details = self.seal.unseal(request_id, entry.body)
        return JournalRecord(request_id, tenant, token_ids, entry.attempt, details)


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """States that are made meanwhile have a journal that can be read."""
    with (
        patch.object(state_module, "Seal", ReadableSeal),
        patch.object(state_module, "RedisJournalStore", ReadableStore),
        patch.object(state_module, "Journal", ReadableJournal),
    ):
        yield


async def stored_entry(store: Any, request_id: bytes) -> JournalEntry | None:
    """The open entry of a store, or None."""
    entry: JournalEntry | None = await store.read(request_id)
    return entry


async def open_ids(state: State) -> list[bytes]:
    """The ids of open requests, those that expire soonest first."""
    store: Any = state.journal_store
    ids: list[bytes] = await store.open_ids()
    return ids


async def read_journal(journal: Journal, request_id: bytes) -> JournalRecord | None:
    """Reads an entry; see `ReadableJournal.read`."""
    assert isinstance(journal, ReadableJournal)
    return await journal.read(request_id)
