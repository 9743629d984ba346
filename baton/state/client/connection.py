"""All calls to Redis. A cancelled caller never cancels its call in flight.

The call continues in a task that the connection owns, so that its reply is read there and no later call can
receive it. A call past its own deadline first retires its whole client, and is cancelled only then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from redis import exceptions as redis_errors

from baton.base.errors import BatonError, ErrorKind
from baton.base.followed_file import FollowedFile
from baton.base.structured_logs import structlog
from baton.state.client.connect import MAX_CONNECTIONS, Argument, Client, Endpoint, Reply, Script, make_client
from baton.state.client.counters import Counters

# Longest time of a call, including its wait for a connection.
CALL_S = 2.0
# Most calls running or waiting; further ones are refused at once.
MAX_CALLS = 1024

# Seconds between two log lines about commands that the server does not take.
_REFUSALS_S = 60.0

# Beginning of a script that reads the clock of Redis, which all stored times refer to, since clients' clocks
# may differ: `now` in milliseconds, `time` as Redis returns it.
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

T = TypeVar("T")

_log = structlog.get_logger(part="state")

_UNAVAILABLE = (
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
# The states of a server, or of its cluster, in which it refuses commands for a while, whatever they are: an
# outage. By the first word of the reply, which a script's error repeats; redis-py has no class for some.
_STATES = (
    *("MISCONF", "NOREPLICAS", "BUSY", "LOADING", "READONLY", "OOM"),
    *("CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "UNBLOCKED", "NOGOODSLAVE"),
)
_FULL = "max number of clients reached"
_REFUSALS = ("NOAUTH", "WRONGPASS", "NOPERM", "invalid username-password", "Authentication required")


@dataclass(eq=False)
class _Session:
    """One client and its calls. A retired session accepts no new call and is closed after its last one."""

    client: Client
    scripts: dict[str, Script] = field(default_factory=dict)
    calls: int = 0
    retired: bool = False


@dataclass(eq=False)
class _Call:
    """A running call; `session` is set while it may have bytes in flight."""

    began: float
    session: _Session | None = None


class Connection:
    """Runs calls on Redis; logs the beginning and the end of an outage once each."""

    def __init__(
        self,
        endpoint: Endpoint,
        counters: Counters,
        call_s: float = CALL_S,
        followed: FollowedFile[Endpoint] | None = None,
    ) -> None:
        """`followed`: a file with the URL, whose changes take the place of `endpoint`."""
        self._endpoint = endpoint
        self._followed = followed
        self._counters = counters
        self._call_s = call_s
        self._session: _Session | None = None
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[object]] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self._closed = False
        self._down_since: float | None = None
        self._answered_at = -math.inf
        self._refusal_logged_at = -math.inf

    @property
    def down_s(self) -> float | None:
        """Seconds since calls began to fail; None if the last call that ended was answered."""
        since = self._down_since  # read once: metrics are read in another thread
        return None if since is None else time.monotonic() - since

    async def script(self, text: str, keys: Sequence[str], args: Sequence[Argument] = ()) -> Reply:
        """Runs a Lua script on the server that stores `keys`."""

        async def run(session: _Session) -> Reply:
            script = session.scripts.get(text)
            if script is None:
                script = session.scripts[text] = session.client.register_script(text)
            return await script(keys, args)

        return await self._call(run)

    async def ping(self) -> None:
        """Returns once Redis has answered; else raises BatonError(UNAVAILABLE or UNAUTHENTICATED)."""
        await self._call(lambda session: session.client.ping())

    async def close(self, deadline_s: float) -> None:
        """Waits up to `deadline_s` for calls in flight, then cancels them and closes every connection."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=deadline_s)
        if self._session is not None:
            self._retire(self._session)
        for task in self._tasks:
            task.cancel()
        if left := set(self._tasks) | set(self._closings):
            await asyncio.wait(left, timeout=deadline_s)
        if left := set(self._closings):  # started by the cancelled calls
            await asyncio.wait(left, timeout=deadline_s)

    async def _call(self, operation: Callable[[_Session], Awaitable[T]]) -> T:
        if self._closed or len(self._tasks) >= MAX_CALLS:
            reason = "is closed" if self._closed else "has too many calls waiting"
            raise BatonError(ErrorKind.UNAVAILABLE, f"the connection to Redis {reason}")
        loop = asyncio.get_running_loop()
        call = _Call(time.monotonic())
        task = loop.create_task(self._run(call, operation))
        timer = loop.call_later(self._call_s, self._overdue, call, task)
        self._tasks.add(task)

        def ended(done: asyncio.Task[T]) -> None:
            timer.cancel()
            self._tasks.discard(done)
            if not done.cancelled():
                done.exception()  # mark as retrieved: the caller may have been cancelled

        task.add_done_callback(ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not _being_cancelled():  # `close` was called before it began
                raise BatonError(ErrorKind.UNAVAILABLE, "the connection to Redis is closed") from None
            raise

    async def _run(self, call: _Call, operation: Callable[[_Session], Awaitable[T]]) -> T:
        try:
            async with self._slots:
                call.session = self._current_session()
                try:
                    answer = await operation(call.session)
                finally:
                    self._leave(call.session)
        except asyncio.CancelledError:
            # Only `_overdue` and `close` cancel, after they have retired the session.
            raise self._failed(call, redis_errors.TimeoutError("no answer in time")) from None
        except Exception as error:
            raise self._failed(call, error) from error
        self._answered()
        return answer

    def _overdue(self, call: _Call, task: asyncio.Task[T]) -> None:
        if call.session is not None:
            self._counters.clients_dropped += 1
            self._retire(call.session)
        task.cancel()

    def _follow(self, *, at_once: bool) -> None:
        """Retires the current session if the file has another URL by now."""
        if self._followed is None or not self._followed.look(at_once=at_once):
            return
        self._endpoint = self._followed.value
        if self._session is not None:
            self._retire(self._session)

    def _current_session(self) -> _Session:
        self._follow(at_once=False)
        if self._session is None:
            self._session = _Session(make_client(self._endpoint))
        self._session.calls += 1
        return self._session

    def _leave(self, session: _Session) -> None:
        session.calls -= 1
        if session.retired and session.calls == 0:
            self._start_closing(session)

    def _retire(self, session: _Session) -> None:
        if self._session is session:
            self._session = None
        if not session.retired:
            session.retired = True
            if session.calls == 0:
                self._start_closing(session)

    def _start_closing(self, session: _Session) -> None:
        task = asyncio.get_running_loop().create_task(_close(session.client))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    def _answered(self) -> None:
        self._answered_at = time.monotonic()
        if self._down_since is not None:
            seconds = self._answered_at - self._down_since
            self._down_since = None
            _log.info("redis_available", redis=str(self._endpoint), seconds=round(seconds, 3))

    def _failed(self, call: _Call, error: Exception) -> BatonError:
        """Counts and translates an error. The error of a call that began before the last answer is no sign of
        an outage."""
        failure = translate(error, str(self._endpoint))
        self._counters.calls_failed += 1
        if failure.kind is not ErrorKind.INTERNAL and not self._closed:
            self._follow(at_once=True)
        if failure.kind is ErrorKind.UNAUTHENTICATED and call.session is not None:
            self._retire(call.session)  # its connections would not authenticate again
        if failure.kind is ErrorKind.INTERNAL and not self._closed:
            self._command_refused(failure)
        outage = failure.kind is not ErrorKind.INTERNAL and call.began > self._answered_at
        if outage and not self._closed and self._down_since is None:
            self._down_since = time.monotonic()
            self._counters.outages += 1
            _log.warning("redis_unavailable", redis=str(self._endpoint), reason=failure.message)
        return failure

    def _command_refused(self, failure: BatonError) -> None:
        """Logs a command that the server does not take, which is no outage; once a minute."""
        now = time.monotonic()
        if now - self._refusal_logged_at >= _REFUSALS_S:
            self._refusal_logged_at = now
            _log.warning("redis_command_refused", redis=str(self._endpoint), reason=failure.message)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _close(client: Client) -> None:
    try:
        async with asyncio.timeout(1.0):
            await client.aclose()
    except (*_UNAVAILABLE, TimeoutError) as error:
        _log.debug("redis_client_did_not_close", reason=type(error).__name__)


def translate(error: Exception, where: str) -> BatonError:
    """The BatonError for an error of Redis or its client, without its text, which may contain keys."""
    if isinstance(error, BatonError):
        return error
    text = str(error)
    if isinstance(error, _REFUSED) or any(word in text for word in _REFUSALS):
        return BatonError(ErrorKind.UNAUTHENTICATED, f"Redis at {where} refused the user name or password")
    if isinstance(error, redis_errors.TimeoutError):
        return BatonError(ErrorKind.UNAVAILABLE, f"Redis at {where} did not answer in time")
    if isinstance(error, redis_errors.ResponseError) and (state := _state_in(error)):
        return BatonError(ErrorKind.UNAVAILABLE, f"Redis at {where} refuses commands ({state})")
    if isinstance(error, _UNAVAILABLE):
        return BatonError(
            ErrorKind.UNAVAILABLE, f"Redis at {where} cannot be reached ({type(error).__name__})"
        )
    return BatonError(ErrorKind.INTERNAL, f"Redis at {where} refused a command ({type(error).__name__})")


def _state_in(error: redis_errors.ResponseError) -> str:
    """The state of the server that an error reply names; empty where it is about the command."""
    words = [getattr(error, "status_code", None), *(word.lstrip("-") for word in str(error).split())]
    found = next((word for word in words if word in _STATES), "")
    return found or (_FULL if _FULL in str(error) else "")
