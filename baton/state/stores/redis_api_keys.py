"""API keys in Redis: one hash of entries by id, and a version that signs them all.

Each entry is signed for its cluster and its id with a key of the cluster's secret, and the version signs
which entries there are and the set's generation, which grows. So who can write to Redis can neither make a
key, nor bring one back that was revoked, nor remove one unnoticed. They can bring back a whole earlier set:
`KeyView` refuses what is older than it has seen, which a process that starts then cannot know. What else they
can do stands in docs/deployment.md.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import ValidationError

from baton.base.api_keys import ApiKey
from baton.base.cluster_auth import KeyProof
from baton.base.errors import BatonError, ErrorKind
from baton.base.structured_logs import structlog
from baton.state.client.connect import Argument
from baton.state.client.connection import Connection
from baton.state.stores.key_names import Keys

MAX_KEYS = 10_000
# How often a change is tried while others change the keys too.
_TRIES = 10
# The version of a set whose entries are signed one by one, from before versions were signed.
_UNSIGNED = re.compile(r"[0-9a-f]{32}")

# Changes the texts of entries by their ids, or raises BatonError.
Change = Callable[[dict[str, str]], None]

_log = structlog.get_logger(part="state")

# Removes before it sets: a server with full memory refuses a script only at its first write.
_CHANGE = """
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[1] then return 0 end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then redis.call('HDEL', KEYS[1], ARGV[i]) end
end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] ~= '' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""

_LISTING = """
local version = redis.call('GET', KEYS[2]) or ''
if version == ARGV[1] then return {version} end
return {version, redis.call('HGETALL', KEYS[1])}
"""


@dataclass(frozen=True)
class KeyListing:
    """The keys at one version; `entries` is None where the caller has that version. An empty version: no key
    was ever added, or Redis has lost its content. `generation`: grows with each change; 0 where it is not
    signed."""

    version: str
    entries: tuple[ApiKey, ...] | None
    generation: int = 0


@dataclass
class _Stored:
    """The content of Redis: the version, the signed entries by id, and the ids of what is no entry."""

    version: str
    generation: int = 0
    keys: dict[str, ApiKey] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)
    # Whether the version signs these entries.
    complete: bool = True


class RedisKeyStore:
    """Keys in Redis: one script per call. Every method raises BatonError(UNAVAILABLE) where Redis does not
    answer in time, and BatonError(CONFLICT) where its keys are not those that were signed last."""

    def __init__(self, connection: Connection, keys: Keys, proof: KeyProof) -> None:
        self._connection = connection
        self._keys = keys.api_keys
        self._proof = proof

    async def add(self, key: ApiKey) -> None:
        """Adds a key. BatonError(CONFLICT) where its id exists or there are too many."""

        def change(texts: dict[str, str]) -> None:
            if key.key_id in texts:
                raise BatonError(ErrorKind.CONFLICT, f"there is a key {key.key_id} already")
            if len(texts) >= MAX_KEYS:
                raise BatonError(ErrorKind.CONFLICT, f"there are {MAX_KEYS} keys already")
            texts[key.key_id] = key.model_dump_json(exclude_defaults=True)

        await self._change(change)

    async def revoke(self, key_id: str) -> None:
        """Removes a key. BatonError(NOT_FOUND) where there is none with this id."""

        def change(texts: dict[str, str]) -> None:
            if texts.pop(key_id, None) is None:
                raise BatonError(ErrorKind.NOT_FOUND, f"there is no key {key_id}")

        await self._change(change)

    async def sign(self) -> None:
        """Signs the keys as they are now, by a decision of an operator who has looked at them: they were
        restored, or changed otherwise."""
        await self._change(lambda texts: None, accept=True)

    async def listing(self, known_version: str = "") -> KeyListing:
        """All keys, unless the caller's version of them is the current one. Entries that are malformed or not
        signed are logged and left out."""
        stored = await self._read(known_version)
        if stored is None:
            return KeyListing(known_version, None if known_version else ())
        for key_id in stored.other:
            _log.warning(
                "api_key_ignored", reason="malformed, or not signed for this cluster", id=key_id[:64]
            )
        if not stored.complete:
            raise BatonError(ErrorKind.CONFLICT, "the API keys in Redis are not those that were signed last")
        return KeyListing(stored.version, tuple(stored.keys.values()), stored.generation)

    async def unsigned_listing(self) -> list[ApiKey]:
        """The signed entries, whether or not they are all that were signed last; for operators."""
        stored = await self._read()
        return [] if stored is None else list(stored.keys.values())

    async def _change(self, change: Change, *, accept: bool = False) -> None:
        for _ in range(_TRIES):
            stored = await self._read() or _Stored("")
            if not (stored.complete or accept):
                message = "the API keys in Redis are not those that were signed last: see `baton keys sign`"
                raise BatonError(ErrorKind.CONFLICT, message)
            texts = dict(stored.texts)
            change(texts)
            values = {key_id: f"{self._proof.sign(key_id, text)}:{text}" for key_id, text in texts.items()}
            generation = max(stored.generation + 1, time.time_ns() // 1_000_000)
            version = f"{generation}:{self._proof.sign_all(generation, values)}"
            gone = dict.fromkeys([*(stored.texts.keys() - values.keys()), *stored.other], "")
            args: list[Argument] = [stored.version, version]
            args += [part for item in {**gone, **values}.items() for part in item]
            if await self._connection.script(_CHANGE, self._keys, args) == 1:
                return
        raise BatonError(ErrorKind.CONFLICT, "others change the API keys at the same time: try again")

    async def _read(self, known_version: str = "") -> _Stored | None:
        """Reads the stored keys; None if the version is the known one."""
        reply = await self._connection.script(_LISTING, self._keys, [known_version])
        if not isinstance(reply, list) or not isinstance(reply[0], bytes):
            raise BatonError(ErrorKind.INTERNAL, "Redis answered a listing of keys with another type")
        if len(reply) == 1:
            return None
        parts = reply[1] if isinstance(reply[1], list) else []
        pairs = dict(zip(parts[::2], parts[1::2], strict=False))
        stored = _Stored(reply[0].decode(errors="replace"))
        signed = not _UNSIGNED.fullmatch(stored.version)
        for name, value in pairs.items():
            self._take(stored, name, value, signed=signed)
        if signed and stored.version:
            stored.generation = self._generation(stored)
            stored.complete = stored.generation > 0
        elif not stored.version:  # Redis has lost it, maybe not the entries
            stored.complete = not stored.keys
        return stored

    def _generation(self, stored: _Stored) -> int:
        """The generation that the version states; 0 where it does not sign these entries."""
        number, _, proof = stored.version.partition(":")
        if not number.isascii() or not number.isdecimal() or len(number) > 18:
            return 0
        values = {key_id: f"{self._proof.sign(key_id, text)}:{text}" for key_id, text in stored.texts.items()}
        return int(number) if self._proof.verify_all(proof, int(number), values) else 0

    def _take(self, stored: _Stored, name: object, value: object, *, signed: bool) -> None:
        key_id = name.decode(errors="replace") if isinstance(name, bytes) else ""
        try:
            proof, _, text = value.decode().partition(":") if isinstance(value, bytes) else ("", "", "")
            valid = (
                self._proof.verify(proof, key_id, text) if signed else self._proof.verify_alone(proof, text)
            )
            key = ApiKey.model_validate(json.loads(text)) if valid else None
        except (ValidationError, ValueError):
            key = None
        if key is None or key.key_id != key_id:
            stored.other.append(key_id)
        else:
            stored.keys[key_id], stored.texts[key_id] = key, text
