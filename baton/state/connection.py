"""The one door to Redis. No call is ever cancelled in flight by whoever made it.

A caller that is cancelled, or gives up, leaves its call running in a task that the connection owns:
the reply is read by the call that asked, so no later caller can read it. A call past its own
deadline takes its whole client out of use first and is ended only then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from redis import exceptions as redis_errors

from baton.errors import BatonError, ErrorKind
from baton.state.connect import MAX_CONNECTIONS, Argument, Client, Endpoint, Reply, Script, make_client
from baton.state.counters import Counters

# The longest a call may take, waiting for its turn included.
CALL_S = 2.0
# Calls that run or wait for their turn; more are refused at once.
MAX_CALLS = 1024

T = TypeVar("T")

_log = structlog.get_logger(part="state")

_AWAY = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.ClusterError,
    redis_errors.RedisClusterException,
    redis_errors.ReadOnlyError,
    redis_errors.TryAgainError,
    redis_errors.OutOfMemoryError,
    OSError,
)
_REFUSED = (
    redis_errors.AuthenticationError,
    redis_errors.AuthenticationWrongNumberOfArgsError,
    redis_errors.AuthorizationError,
    redis_errors.NoPermissionError,
)
_REFUSALS = ("NOAUTH", "WRONGPASS", "NOPERM", "invalid username-password", "Authentication required")


@dataclass(eq=False)
class _Lane:
    """One client and its calls. A retired lane takes no new call and is closed after its last."""

    client: Client
    scripts: dict[str, Script] = field(default_factory=dict)
    calls: int = 0
    retired: bool = False


@dataclass(eq=False)
class _Call:
    """A call on its way; `lane` is set while it may have bytes in flight."""

    began: float
    lane: _Lane | None = None


class Connection:
    """Runs calls on Redis; tells an outage from the log once, and its end once."""

    def __init__(self, endpoint: Endpoint, counters: Counters, call_s: float = CALL_S) -> None:
        self._endpoint = endpoint
        self._counters = counters
        self._call_s = call_s
        self._lane: _Lane | None = None
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[object]] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self._closed = False
        self._down_since: float | None = None
        self._answered_at = -math.inf

    @property
    def down_s(self) -> float | None:
        """Seconds since calls began to get no answer; None where the last one that ended got one."""
        since = self._down_since  # read once: metrics ask from a thread of their own
        return None if since is None else time.monotonic() - since

    async def script(self, text: str, keys: Sequence[str], args: Sequence[Argument] = ()) -> Reply:
        """Runs a Lua script on the server that has `keys`."""

        async def run(lane: _Lane) -> Reply:
            script = lane.scripts.get(text)
            if script is None:
                script = lane.scripts[text] = lane.client.register_script(text)
            return await script(keys, args)

        return await self._call(run)

    async def ping(self) -> None:
        """Returns once Redis answered; BatonError(UNAVAILABLE or UNAUTHENTICATED) else."""
        await self._call(lambda lane: lane.client.ping())

    async def close(self, deadline_s: float) -> None:
        """Lets calls in flight end within `deadline_s`, then ends them and closes every connection."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=deadline_s)
        if self._lane is not None:
            self._retire(self._lane)
        for task in self._tasks:
            task.cancel()
        if left := set(self._tasks) | set(self._closings):
            await asyncio.wait(left, timeout=deadline_s)
        if left := set(self._closings):  # those that the ended calls began
            await asyncio.wait(left, timeout=deadline_s)

    async def _call(self, operation: Callable[[_Lane], Awaitable[T]]) -> T:
        if self._closed or len(self._tasks) >= MAX_CALLS:
            why = "is closed" if self._closed else "has too many calls waiting"
            raise BatonError(ErrorKind.UNAVAILABLE, f"the connection to Redis {why}")
        loop = asyncio.get_running_loop()
        call = _Call(time.monotonic())
        task = loop.create_task(self._run(call, operation))
        timer = loop.call_later(self._call_s, self._overdue, call, task)
        self._tasks.add(task)

        def ended(done: asyncio.Task[T]) -> None:
            timer.cancel()
            self._tasks.discard(done)
            if not done.cancelled():
                done.exception()  # retrieved: nobody may be waiting any more

        task.add_done_callback(ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not _being_cancelled():  # `close` came before it began
                raise BatonError(ErrorKind.UNAVAILABLE, "the connection to Redis is closed") from None
            raise

    async def _run(self, call: _Call, operation: Callable[[_Lane], Awaitable[T]]) -> T:
        self._counters.calls += 1
        try:
            async with self._turns:
                call.lane = self._current_lane()
                try:
                    answer = await operation(call.lane)
                finally:
                    self._leave(call.lane)
        except asyncio.CancelledError:
            # Only `_overdue` and `close` cancel, and both retired the lane before.
            raise self._failed(call, redis_errors.TimeoutError("no answer in time")) from None
        except Exception as error:
            raise self._failed(call, error) from error
        self._answered()
        return answer

    def _overdue(self, call: _Call, task: asyncio.Task[T]) -> None:
        if call.lane is not None:
            self._counters.clients_dropped += 1
            self._retire(call.lane)
        task.cancel()

    def _current_lane(self) -> _Lane:
        if self._lane is None:
            self._lane = _Lane(make_client(self._endpoint))
        self._lane.calls += 1
        return self._lane

    def _leave(self, lane: _Lane) -> None:
        lane.calls -= 1
        if lane.retired and lane.calls == 0:
            self._start_closing(lane)

    def _retire(self, lane: _Lane) -> None:
        if self._lane is lane:
            self._lane = None
        if not lane.retired:
            lane.retired = True
            if lane.calls == 0:
                self._start_closing(lane)

    def _start_closing(self, lane: _Lane) -> None:
        task = asyncio.get_running_loop().create_task(_close(lane.client))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    def _answered(self) -> None:
        self._answered_at = time.monotonic()
        if self._down_since is not None:
            seconds = self._answered_at - self._down_since
            self._down_since = None
            _log.info("redis_available", redis=str(self._endpoint), seconds=round(seconds, 3))

    def _failed(self, call: _Call, error: Exception) -> BatonError:
        """A call that began before the last answer tells of an outage that has ended."""
        told = _translate(error, str(self._endpoint))
        self._counters.calls_failed += 1
        away = told.kind is not ErrorKind.INTERNAL and call.began > self._answered_at
        if away and not self._closed and self._down_since is None:
            self._down_since = time.monotonic()
            self._counters.outages += 1
            _log.warning("redis_unavailable", redis=str(self._endpoint), why=told.message)
        return told


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _close(client: Client) -> None:
    try:
        async with asyncio.timeout(1.0):
            await client.aclose()
    except (*_AWAY, TimeoutError) as error:
        _log.debug("redis_client_did_not_close", why=type(error).__name__)


def _translate(error: Exception, where: str) -> BatonError:
    """What Redis or its client said, in our words; its own text may hold keys, so it stays out."""
    if isinstance(error, BatonError):
        return error
    text = str(error)
    if isinstance(error, _REFUSED) or any(word in text for word in _REFUSALS):
        return BatonError(ErrorKind.UNAUTHENTICATED, f"Redis at {where} refused our user name or password")
    if isinstance(error, redis_errors.TimeoutError):
        return BatonError(ErrorKind.UNAVAILABLE, f"Redis at {where} did not answer in time")
    if isinstance(error, _AWAY):
        return BatonError(
            ErrorKind.UNAVAILABLE, f"Redis at {where} cannot be reached ({type(error).__name__})"
        )
    return BatonError(ErrorKind.INTERNAL, f"Redis at {where} refused a command ({type(error).__name__})")
