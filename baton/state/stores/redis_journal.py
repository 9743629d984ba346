"""The journal in Redis: one hash per request, and a sorted set of open requests by expiry."""

from __future__ import annotations

from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.state.client.connect import Argument
from baton.state.client.connection import NOW, Connection
from baton.state.stores.key_names import Keys
from baton.state.stores.records import JournalWrite

# A server with full memory refuses this script if its first write is an append, and runs it if it is a close.
_WRITE = (
    NOW
    + """
local open = KEYS[1]
for i = 2, #KEYS do
  local key, at = KEYS[i], (i - 2) * 5
  local id, action, attempt, ttl_ms, body = unpack(ARGV, at + 1, at + 5)
  if action == 'append' then
    redis.call('HSET', key, 'body', body, 'attempt', attempt)
    redis.call('PEXPIRE', key, ttl_ms)
    redis.call('ZADD', open, now + ttl_ms, id)
    if redis.call('PTTL', open) < tonumber(ttl_ms) then redis.call('PEXPIRE', open, ttl_ms) end
  elseif action == 'attempt' then
    local known = tonumber(redis.call('HGET', key, 'attempt') or -1)
    if known >= 0 and known < tonumber(attempt) then redis.call('HSET', key, 'attempt', attempt) end
  else
    redis.call('UNLINK', key)
    redis.call('ZREM', open, id)
  end
end
redis.call('ZREMRANGEBYSCORE', open, '-inf', now)
return 1
"""
)

_COUNT = NOW + "return redis.call('ZCOUNT', KEYS[1], '(' .. now, '+inf')"


class RedisJournalStore:
    """`stores.JournalStore` in Redis: one script per batch."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def write(self, writes: Sequence[JournalWrite]) -> None:
        keys = [self._keys.journal_open]
        args: list[Argument] = []
        for one in writes:
            keys.append(self._keys.journal_entry(one.request_id))
            ttl_ms = max(1, round(one.ttl_s * 1000))
            args += [one.request_id, one.action, one.attempt, ttl_ms, one.body]
        if writes:
            await self._connection.script(_WRITE, keys, args)

    async def count_open(self) -> int:
        reply = await self._connection.script(_COUNT, [self._keys.journal_open])
        if not isinstance(reply, int):
            raise BatonError(ErrorKind.INTERNAL, "Redis answered a count with another type")
        return reply
