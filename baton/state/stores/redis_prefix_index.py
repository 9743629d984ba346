"""The prefix index in Redis: one set per worker incarnation, which expires as a whole.

An empty member keeps the set of a worker without blocks alive and distinguishes it from an unknown one.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.state.client.connect import Argument
from baton.state.client.connection import Connection
from baton.state.stores.key_names import PREFIX_S, Keys
from baton.state.stores.protocols import MAX_DELTA, MAX_LOOKUP_BLOCKS, MAX_LOOKUP_HOLDERS

# Adds before it removes: a server with full memory refuses a script only at its first write.
_APPLY = """
local fresh, ttl_ms, added = ARGV[1] == '1', ARGV[2], tonumber(ARGV[3])
if fresh then
  redis.call('SADD', KEYS[1], '')
  redis.call('UNLINK', KEYS[1])
  redis.call('SADD', KEYS[1], '')
elseif redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
for i = 4, #ARGV do
  redis.call(i < 4 + added and 'SADD' or 'SREM', KEYS[1], ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], ttl_ms)
return 1
"""

# Checks 32 blocks at a time, up to the first one that is missing.
_LONGEST = """
local answer = {}
for k, key in ipairs(KEYS) do
  local count, i = 0, 1
  while i <= #ARGV do
    local has = redis.call('SMISMEMBER', key, unpack(ARGV, i, math.min(i + 31, #ARGV)))
    local run = 0
    while has[run + 1] == 1 do run = run + 1 end
    count = count + run
    if run < #has then break end
    i = i + 32
  end
  answer[k] = count
end
return answer
"""


class RedisPrefixIndex:
    """`stores.PrefixIndex` in Redis: one script per call."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def apply(
        self, holder: str, added: Sequence[bytes], removed: Sequence[bytes], *, fresh: bool = False
    ) -> bool:
        if len(added) + len(removed) > MAX_DELTA:
            raise BatonError(ErrorKind.INVALID, f"more than {MAX_DELTA} changes of the prefix index")
        args: list[Argument] = [int(fresh), round(PREFIX_S * 1000), len(added), *added, *removed]
        return await self._connection.script(_APPLY, [self._keys.cached_blocks(holder)], args) == 1

    async def longest_prefix(self, hashes: Sequence[bytes], holders: Sequence[str]) -> dict[str, int]:
        looked_up = list(dict.fromkeys(holders))[:MAX_LOOKUP_HOLDERS]
        if not hashes or not looked_up:
            return {}
        keys = [self._keys.cached_blocks(holder) for holder in looked_up]
        counts = await self._connection.script(_LONGEST, keys, hashes[:MAX_LOOKUP_BLOCKS])
        if not isinstance(counts, list):
            raise BatonError(ErrorKind.INTERNAL, "Redis answered a prefix lookup with another type")
        found = zip(looked_up, counts, strict=True)
        return {holder: count for holder, count in found if isinstance(count, int) and count > 0}

    async def forget(self, holder: str) -> None:
        await self._connection.script(
            "return redis.call('UNLINK', KEYS[1])", [self._keys.cached_blocks(holder)]
        )
