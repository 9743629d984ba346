"""API keys in Redis: one hash of entries by id, and a random version that changes with each of them.

Entries are signed with a key of the cluster's secret: who can write to Redis can remove keys, but not make
one.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

from pydantic import ValidationError

from baton.api_keys import ApiKey
from baton.cluster_auth import KeyProof
from baton.errors import BatonError, ErrorKind
from baton.state.client.connect import Argument
from baton.state.client.connection import Connection
from baton.state.keys import Keys
from baton.structured_logs import structlog

MAX_KEYS = 10_000

_log = structlog.get_logger(part="state")

_ADD = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then return -1 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
return 1
"""

# Removes before it sets: a server with full memory refuses a script only at its first write.
_REVOKE = """
local removed = redis.call('HDEL', KEYS[1], ARGV[1])
if removed == 1 then redis.call('SET', KEYS[2], ARGV[2]) end
return removed
"""

_LISTING = """
local version = redis.call('GET', KEYS[2]) or ''
if version == ARGV[1] then return {version} end
return {version, redis.call('HVALS', KEYS[1])}
"""


@dataclass(frozen=True)
class KeyListing:
    """The keys at one version; `entries` is None where the caller has that version. An empty version: no key
    was ever added, or Redis has lost its content."""

    version: str
    entries: tuple[ApiKey, ...] | None


class RedisKeyStore:
    """Keys in Redis: one script per call. Every method raises BatonError(UNAVAILABLE) where Redis does not
    answer in time."""

    def __init__(self, connection: Connection, keys: Keys, proof: KeyProof) -> None:
        self._connection = connection
        self._keys = keys.api_keys
        self._proof = proof

    async def add(self, key: ApiKey) -> None:
        """Adds a key. BatonError(CONFLICT) where its id exists or there are too many."""
        text = key.model_dump_json(exclude_defaults=True)
        value = f"{self._proof.sign(text)}:{text}"
        args: list[Argument] = [key.key_id, value, uuid.uuid4().hex, MAX_KEYS]
        added = await self._connection.script(_ADD, self._keys, args)
        if added == -1:
            raise BatonError(ErrorKind.CONFLICT, f"there are {MAX_KEYS} keys already")
        if added != 1:
            raise BatonError(ErrorKind.CONFLICT, f"there is a key {key.key_id} already")

    async def revoke(self, key_id: str) -> None:
        """Removes a key. BatonError(NOT_FOUND) where there is none with this id."""
        if await self._connection.script(_REVOKE, self._keys, [key_id, uuid.uuid4().hex]) != 1:
            raise BatonError(ErrorKind.NOT_FOUND, f"there is no key {key_id}")

    async def listing(self, known_version: str = "") -> KeyListing:
        """All keys, unless the caller's version of them is the current one. Entries that are malformed or not
        signed with the cluster's secret are logged and left out."""
        reply = await self._connection.script(_LISTING, self._keys, [known_version])
        if not isinstance(reply, list) or not isinstance(reply[0], bytes):
            raise BatonError(ErrorKind.INTERNAL, "Redis answered a listing of keys with another type")
        version = reply[0].decode()
        if len(reply) == 1:
            return KeyListing(version, None if version else ())
        values = reply[1] if isinstance(reply[1], list) else []
        return KeyListing(version, tuple(key for value in values if (key := self._parse(value)) is not None))

    def _parse(self, value: object) -> ApiKey | None:
        try:
            if not isinstance(value, bytes):
                raise ValueError("not a string")
            proof, _, text = value.decode().partition(":")
            if not self._proof.verify(proof, text):
                raise ValueError("not signed with this cluster's secret")
            return ApiKey.model_validate(json.loads(text))
        except ValidationError:
            reason = "malformed"
        except ValueError as error:
            reason = str(error) if type(error) is ValueError else "malformed"
        _log.warning("api_key_ignored", reason=reason)
        return None
