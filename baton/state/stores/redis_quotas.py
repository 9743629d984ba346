"""Quotas in Redis: one script per call, which reads the clock of Redis."""

from __future__ import annotations

from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.state.client.connect import Argument
from baton.state.client.connection import NOW, Connection
from baton.state.stores.key_names import QUOTA_LEASE_S, Keys
from baton.state.stores.protocols import MAX_REBALANCED
from baton.state.stores.records import QuotaAsk, QuotaGrant, Rebalance

_BUCKETS = 3
# A lease that ends later than one that begins now is of a clock that has gone back, and over: its router, if
# it lives, gets another with its next call. Since a time that is still to come nothing has passed.
#
# Arguments of one tenant: limit, balance and wanted amount of each bucket; limit, running and wanted slots.
_REBALANCE = (
    NOW
    + """
local router, lease_ms, known = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('ZADD', KEYS[1], now + lease_ms, router)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. now + lease_ms, '+inf')
redis.call('PEXPIRE', KEYS[1], lease_ms)
local live, routers = {}, redis.call('ZRANGE', KEYS[1], 0, -1)
for _, name in ipairs(routers) do live[name] = true end
local answer = {tostring(#routers)}
local count = math.max(#routers, known)
local at = 3

local function argument()
  at = at + 1
  return tonumber(ARGV[at])
end

-- What the other routers hold of one limit, and what those held that have ended, which are forgotten.
local function held_by_others(key, stored, prefix)
  local sum, freed = 0, 0
  for field, value in pairs(stored) do
    if string.sub(field, 1, #prefix) == prefix then
      local name = string.sub(field, #prefix + 1)
      if not live[name] then
        redis.call('HDEL', key, field)
        freed = freed + tonumber(value)
      elseif name ~= router then
        sum = sum + tonumber(value)
      end
    end
  end
  return sum, freed
end

for k = 2, #KEYS do
  local key, stored = KEYS[k], {}
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do stored[flat[i]] = flat[i + 1] end
  local passed, ttl_ms = math.max(0, now - (tonumber(stored.at) or now)), 120000
  redis.call('HSET', key, 'at', now)
  for b = 1, 3 do
    local limit, balance, wanted = argument(), argument(), argument()
    local change = 0
    if limit > 0 then
      local others, freed = held_by_others(key, stored, 'hold' .. b .. ':')
      local before = tonumber(stored['limit' .. b]) or limit
      local level = tonumber(stored['level' .. b]) or (limit - others - math.max(0, balance))
      level = level + freed + passed * before / 60000 + limit - before
      level = math.min(level, limit - others - balance)
      local left = level + balance
      local share = count == 1 and left or (left + others) / (2 * count)
      local hold = math.max(0, math.min(left, math.max(share, wanted)))
      change = hold - balance
      level = left - hold
      redis.call('HSET', key, 'limit' .. b, limit, 'level' .. b, string.format('%.6f', level),
        'hold' .. b .. ':' .. router, string.format('%.6f', hold))
      ttl_ms = math.max(ttl_ms, math.ceil(60000 * (2 - level / limit)))
    end
    answer[#answer + 1] = string.format('%.6f', change)
  end
  local most, running, wanted = argument(), argument(), argument()
  local slots = 0
  if most > 0 then
    local others = held_by_others(key, stored, 'slots:')
    local free = math.max(0, most - others)
    local share = math.max(1, math.floor((free - running) / count))
    if count == 1 then share = free end
    slots = math.max(running, math.min(free, math.max(running + share, wanted)))
    redis.call('HSET', key, 'slots:' .. router, slots)
  end
  answer[#answer + 1] = string.format('%d', slots)
  redis.call('PEXPIRE', key, ttl_ms)
end
return answer
"""
)


class RedisQuotas:
    """Keeps the tenants' quotas (`stores.Quotas`) in Redis."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def rebalance(self, router: str, asks: Sequence[QuotaAsk], known: int = 1) -> Rebalance:
        if len(asks) > MAX_REBALANCED:
            raise BatonError(ErrorKind.INVALID, f"more than {MAX_REBALANCED} tenants are rebalanced at once")
        args: list[Argument] = [router, round(QUOTA_LEASE_S * 1000), known]
        for ask in asks:
            for bucket in ask.buckets:
                args += (
                    (0, 0, 0)
                    if bucket is None
                    else (bucket.per_minute, f"{bucket.balance:.6f}", f"{bucket.wanted:.6f}")
                )
            slots = ask.slots
            args += (0, 0, 0) if slots is None else (slots.most, slots.running, slots.wanted)
        keys = [self._keys.quota_routers, *(self._keys.quota(ask.tenant) for ask in asks)]
        answer = await self._connection.script(_REBALANCE, keys, args)
        if not isinstance(answer, list) or len(answer) != 1 + len(asks) * (_BUCKETS + 1):
            raise BatonError(ErrorKind.INTERNAL, "Redis answered a rebalance with something else")
        return _rebalance([float(value) for value in answer])  # type: ignore[arg-type]

    async def withdraw(self, router: str) -> None:
        await self._connection.script(
            "return redis.call('ZREM', KEYS[1], ARGV[1])", [self._keys.quota_routers], [router]
        )


def _rebalance(values: Sequence[float]) -> Rebalance:
    grants = [
        QuotaGrant(tuple(values[at : at + _BUCKETS]), int(values[at + _BUCKETS]))
        for at in range(1, len(values), _BUCKETS + 1)
    ]
    return Rebalance(int(values[0]), tuple(grants))
