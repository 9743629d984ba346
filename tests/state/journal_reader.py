"""Reads the journal, as a router that resumes requests would; production only writes it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag

from baton.base.errors import BatonError, ErrorKind
from baton.state import JournalRecord, State
from baton.state.client.connection import NOW
from baton.state.journal import Journal
from baton.state.redis_journal import RedisJournalStore
from baton.state.seal import Seal

_NONCE = slice(1, 13)
_OPEN = NOW + "return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')"
_READ = "return redis.call('HMGET', KEYS[1], 'body', 'attempt')"


@dataclass(frozen=True)
class JournalEntry:
    """A stored entry with its sealed body."""

    body: bytes
    attempt: int


def unseal(seal: Seal, request_id: bytes, sealed: bytes) -> tuple[str, tuple[int, ...], bytes]:
    """Decrypts an entry into tenant, token ids and details. Raises BatonError(INTERNAL) where the key or the
    request id is wrong."""
    try:
        if sealed[:1] != b"\x01":
            raise ValueError  # of another version
        plain = seal._cipher.decrypt(sealed[_NONCE], sealed[_NONCE.stop :], seal._context + request_id)
    except (InvalidTag, ValueError) as error:
        raise BatonError(ErrorKind.INTERNAL, "a journal entry cannot be opened with this key") from error
    name_bytes, details_bytes = struct.unpack_from("<II", plain)
    tenant, rest = plain[8 : 8 + name_bytes], plain[8 + name_bytes :]
    details, ids = rest[:details_bytes], rest[details_bytes:]
    return tenant.decode(), struct.unpack(f"<{len(ids) // 4}I", ids), details


async def stored_entry(store: Any, request_id: bytes) -> JournalEntry | None:
    """The open entry of a store, or None."""
    if not isinstance(store, RedisJournalStore):
        entry: JournalEntry | None = await store.read(request_id)
        return entry
    reply: Any = await store._connection.script(_READ, [store._keys.journal_entry(request_id)])
    return None if reply[0] is None else JournalEntry(reply[0], int(reply[1]))


async def open_ids(state: State) -> list[bytes]:
    """The ids of open requests, those that expire soonest first."""
    store: Any = state.journal_store
    if not isinstance(store, RedisJournalStore):
        ids: list[bytes] = await store.open_ids()
    else:
        reply: Any = await store._connection.script(_OPEN, [store._keys.journal_open])
        ids = list(reply)
    return ids


async def read_journal(journal: Journal, request_id: bytes) -> JournalRecord | None:
    """The open request or None. Raises BatonError(INTERNAL) where it was sealed with another key."""
    entry = await stored_entry(journal._store, request_id)
    if entry is None:
        return None
    tenant, token_ids, details = unseal(journal._seal, request_id, entry.body)
    return JournalRecord(request_id, tenant, token_ids, entry.attempt, details)
