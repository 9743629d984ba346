"""The registry in Redis. All times are of the clock of Redis."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from pydantic import ValidationError

from baton.base.errors import BatonError, ErrorKind, NameTakenError
from baton.base.structured_logs import structlog
from baton.state.client.connect import Argument, Reply
from baton.state.client.connection import NOW, Connection
from baton.state.client.counters import Counters
from baton.state.stores.key_names import ABANDONED_S, FORGET_MEMBER_S, MOST_LEASE_S, Keys
from baton.state.stores.records import Kept, Listed, Listing, Member

_log = structlog.get_logger(part="state")

# Begins the reply to an announcement that is refused, before the entry of the member that has the name.
_TAKEN = b"taken:"

# The first write needs no memory (PEXPIRE): a server with full memory refuses a script only at its first
# write, and leases must not expire because the journal is large.
#
# Whether the holder of a name keeps it: its lease is live, it does not drain, and the worker that it took the
# name from has learnt of that (which writes the keeper). JSON escapes quotes within values.
#
# A lease that ends later than any that begins now is of a clock that has gone back, and over: a worker that
# lives has another within a second.
_KEEPS = (
    f"local longest = {round(1000 * MOST_LEASE_S)}"
    + """
local function drains(member) return string.find(member, '"draining":true', 1, true) ~= nil end
local function keeps(name, held)
  local lease_end = redis.call('ZSCORE', KEYS[3], name)
  local kept = held and lease_end and tonumber(lease_end) > now and tonumber(lease_end) <= now + longest
    and not drains(held)
  return kept and redis.call('HGET', KEYS[4], name) == string.match(held, '^%x+') and lease_end
end
"""
)

# A first announcement takes its generation from the clock in microseconds, so that later starts are higher
# even after a wipe. The same incarnation may announce itself repeatedly.
_ANNOUNCE = (
    NOW
    + _KEEPS
    + """
local epoch, members, leases, keepers = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local name, incarnation, generation, member = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local lease_ms, new_epoch, forget_ms, abandoned_ms = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local fresh = time[1] * 1000000 + time[2]
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, abandoned_ms) end
local held = redis.call('HGET', members, name)
if held then
  local holder, number = string.match(held, '^(%x+):(%d+):')
  number = tonumber(number)
  if holder == incarnation then
    generation = math.max(generation, number)
  elseif generation == 0 then
    if keeps(name, held) then return 'taken:' .. held end
    generation = math.max(fresh, number + 1)
  elseif generation < number then
    if not drains(member) then redis.call('HSET', keepers, name, holder) end
    return 'taken:' .. held
  end
elseif generation == 0 then
  generation = fresh
end
local old = redis.call('ZRANGEBYSCORE', leases, '-inf', now - forget_ms, 'LIMIT', 0, 100)
for _, lapsed in ipairs(old) do
  redis.call('HDEL', members, lapsed)
  redis.call('ZREM', leases, lapsed)
  redis.call('HDEL', keepers, lapsed)
end
local number = string.format('%.0f', generation)
redis.call('SET', epoch, new_epoch, 'NX')
redis.call('HSET', members, name, incarnation .. ':' .. number .. ':' .. member)
redis.call('ZADD', leases, now + lease_ms, name)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, abandoned_ms) end
return number
"""
)

_WITHDRAW = """
local held = redis.call('HGET', KEYS[2], ARGV[1])
if held and string.match(held, '^(%x+):') == ARGV[2] then
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('HDEL', KEYS[4], ARGV[1])
end
return 1
"""

_KEEPER = (
    NOW
    + _KEEPS
    + """
local held = redis.call('HGET', KEYS[2], ARGV[1])
local lease_end = keeps(ARGV[1], held)
return lease_end and {lease_end, held} or {}
"""
)

_LISTING = (
    NOW
    + f"local longest = {round(1000 * MOST_LEASE_S)}"
    + """
local answer = {redis.call('GET', KEYS[1]) or ''}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. now, now + longest)) do
  local held = redis.call('HGET', KEYS[2], name)
  if held then table.insert(answer, held) end
end
return answer
"""
)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def parse_members(values: list[Reply], counters: Counters) -> Iterator[Listed]:
    """Parses `values`; malformed members are counted and skipped."""
    for value in values:
        try:
            if not isinstance(value, bytes):
                raise ValueError("not a string")
            incarnation, generation, text = value.decode().split(":", 2)
            member = Member.model_validate_json(text)
            if member.incarnation != incarnation:
                raise ValueError("two incarnations")
            yield Listed(member, int(generation))
        except (ValueError, ValidationError) as error:
            counters.malformed += 1
            _log.debug("malformed_member", reason=type(error).__name__)


class RedisRegistry:
    """`stores.Registry` in Redis: one script per call."""

    def __init__(self, connection: Connection, keys: Keys, counters: Counters) -> None:
        self._connection = connection
        self._keys = keys.registry
        self._counters = counters

    async def announce(self, member: Member, generation: int, lease_s: float) -> int:
        lease, forget, abandoned = _ms(lease_s), _ms(FORGET_MEMBER_S), _ms(ABANDONED_S)
        text, epoch = member.model_dump_json(), uuid.uuid4().hex
        name, incarnation = member.name, member.incarnation
        args: list[Argument] = [name, incarnation, generation, text, lease, epoch, forget, abandoned]
        reply = await self._connection.script(_ANNOUNCE, self._keys, args)
        if not isinstance(reply, bytes):
            raise BatonError(ErrorKind.INTERNAL, "Redis answered an announcement with another type")
        if reply.startswith(_TAKEN):
            raise self._taken(name, reply.removeprefix(_TAKEN), kept=generation == 0)
        return int(reply)

    def _taken(self, name: str, held: bytes, *, kept: bool) -> NameTakenError:
        other = next(parse_members([held], self._counters), None)
        host, address = (other.member.host, other.member.addresses.get("grpc", "")) if other else ("", "")
        return NameTakenError(name, host, address, kept=kept)

    async def keeper(self, name: str) -> Kept | None:
        reply = await self._connection.script(_KEEPER, self._keys, [name])
        if not isinstance(reply, list):
            raise BatonError(ErrorKind.INTERNAL, "Redis answered for the keeper of a name with another type")
        if not reply:
            return None
        lease_end_ms, held = reply
        other = next(parse_members([held], self._counters), None)
        return None if other is None else Kept(other.member, int(float(lease_end_ms)))  # type: ignore[arg-type]

    async def withdraw(self, name: str, incarnation: str) -> None:
        await self._connection.script(_WITHDRAW, self._keys, [name, incarnation])

    async def listing(self) -> Listing:
        reply = await self._connection.script(_LISTING, self._keys)
        if not isinstance(reply, list) or not isinstance(reply[0], bytes):
            raise BatonError(ErrorKind.INTERNAL, "Redis answered a listing with another type")
        return Listing(reply[0].decode(), tuple(parse_members(reply[1:], self._counters)))
