"""Stored responses in Redis: one sealed string each, with an index of each tenant's by expiry."""

from __future__ import annotations

from baton.base.errors import BatonError, ErrorKind
from baton.state.client.connect import Argument
from baton.state.client.connection import NOW, Connection
from baton.state.stores.key_names import Keys
from baton.state.stores.response_seal import ResponseSeal

# Share of Redis's `maxmemory` up to which responses are stored: registry and journal need the rest.
_MOST_MEMORY = 0.8

# `forget(ids)` removes a tenant's records; those that have expired are removed from the index alone. For so
# long an empty string stands in the place of a record that was deleted: a write of it that had seemed to
# fail may be tried again.
TOMBSTONE_S = 60.0

_FORGET = (
    NOW
    + """
local index, sizes, record, id = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local prefix = string.sub(record, 1, #record - #id)
local function forget(ids)
  for _, one in ipairs(ids) do
    redis.call('UNLINK', prefix .. one)
    redis.call('ZREM', index, one)
    redis.call('HINCRBY', sizes, 'total', -tonumber(redis.call('HGET', sizes, one) or 0))
    redis.call('HDEL', sizes, one)
  end
end
"""
)

# The first write is the one that needs memory: a server with full memory refuses a script only there.
# Not every server lets a client read INFO; then there is no share to keep.
_PUT = (
    _FORGET
    + f"""
local info = redis.pcall('INFO', 'memory')
if type(info) == 'string' then
  local most = tonumber(string.match(info, '\\nmaxmemory:(%d+)'))
  local used = tonumber(string.match(info, '\\nused_memory:(%d+)'))
  if most and used and most > 0 and used + #ARGV[2] > {_MOST_MEMORY} * most then return 0 end
end
"""
    + """
local body, ttl_ms, most = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('GET', record) == '' then return 1 end
redis.call('SET', record, body, 'PX', ttl_ms)
local before = tonumber(redis.call('HGET', sizes, id) or 0)
redis.call('ZADD', index, now + ttl_ms, id)
redis.call('HSET', sizes, id, #body)
redis.call('HINCRBY', sizes, 'total', #body - before)
forget(redis.call('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, 100))
while tonumber(redis.call('HGET', sizes, 'total')) > most do
  local oldest = redis.call('ZRANGE', index, 0, 0)
  if #oldest == 0 or oldest[1] == id then break end
  forget(oldest)
end
for _, key in ipairs({index, sizes}) do
  if redis.call('PTTL', key) < ttl_ms then redis.call('PEXPIRE', key, ttl_ms) end
end
return 1
"""
)

_DELETE = (
    _FORGET
    + """
local found = redis.call('STRLEN', record)
if found == 0 then return 0 end
forget({id})
redis.call('SET', record, '', 'PX', ARGV[2])
return 1
"""
)


class RedisResponses:
    """`stores.ResponseStore` in Redis: one script per call."""

    def __init__(self, connection: Connection, keys: Keys, seal: ResponseSeal) -> None:
        self._connection = connection
        self._keys = keys
        self._seal = seal

    async def put(self, tenant: str, response_id: str, record: bytes, ttl_s: float, most_bytes: int) -> None:
        body = self._seal.seal(tenant, response_id, record)
        args: list[Argument] = [response_id, body, max(1, round(ttl_s * 1000)), most_bytes]
        if await self._connection.script(_PUT, self._keys.responses(tenant, response_id), args) != 1:
            raise BatonError(ErrorKind.UNAVAILABLE, "Redis has no memory left for responses")

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        key = self._keys.responses(tenant, response_id)[-1]
        body = await self._connection.script("return redis.call('GET', KEYS[1])", [key])
        return self._seal.open(tenant, response_id, body) if isinstance(body, bytes) and body else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        keys = self._keys.responses(tenant, response_id)
        return await self._connection.script(_DELETE, keys, [response_id, round(TOMBSTONE_S * 1000)]) == 1
