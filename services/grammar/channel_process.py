"""The front's side of a process behind a socket: the compile process, or a mask process."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import subprocess
from collections.abc import Callable, Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.base.parent_death import tied
from baton.base.process_stat import process_stat
from baton.v1.masks_pb2 import MaskCommand, MaskEvent
from services.common.observability.logs import get_log
from services.grammar.frames import MAX_FRAME, PREFIX, error_of, failure_of, frame
from services.grammar.launch import CompilerLaunch

# The kind of error after which a router tries again elsewhere, and goes on using the worker for others.
LOST = ErrorKind.CONFLICT
# The longest that a process may take until it serves.
START_S = 60.0
_STOP_S = 2.0

log = get_log(__name__)

Launch = Callable[[int], CompilerLaunch]
"""Settings of the process, given the descriptor of its socket."""


class ChannelProcess:
    """One start of the process. To be used within the event loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        on_event: Callable[[MaskEvent], None],
        on_end: Callable[[int | None], None],
    ) -> None:
        """`on_event`: called with what answers no call. `on_end`: called once, with the exit code, or None
        where this side has killed it."""
        self.process = process
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader, self._writer = streams
        self._on_event = on_event
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[MaskEvent]] = {}
        self._ended = False
        self._answered_at = -math.inf
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        program: Sequence[str],
        launch: Launch,
        inherited: Sequence[int],
        on_event: Callable[[MaskEvent], None],
        on_end: Callable[[int | None], None],
    ) -> ChannelProcess:
        """Starts the process. `inherited`: descriptors that the process gets besides its socket. Raises
        BatonError(CONFLICT) where it cannot be started: no descriptor, no process or no memory is left."""
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                process = _spawn(program, launch(theirs.fileno()), (theirs.fileno(), *inherited))
            streams = await asyncio.open_unix_connection(sock=ours)
        except OSError as error:
            if ours is not None:
                ours.close()
            log.error("mask_process_not_started", reason=error.strerror)
            raise BatonError(LOST, "no process for guided decoding could be started") from None
        log.info("mask_process_started", pid=process.pid, program=program[-1])
        return cls(process, streams, on_event, on_end)

    @property
    def ready(self) -> bool:
        """True if it answers calls at once."""
        return self._ready.done()

    @property
    def calls(self) -> int:
        """Calls that wait for an answer."""
        return len(self._calls)

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that it has used."""
        stat = process_stat(self.process.pid)
        return stat.cpu_s if stat else 0.0

    def answered_within(self, seconds: float) -> bool:
        """True if it has answered a call so recently."""
        return asyncio.get_running_loop().time() - self._answered_at < seconds

    async def until_ready(self) -> None:
        """Waits until the process serves. Raises BatonError: INVALID where the process cannot serve this
        model, CONFLICT where it ended or took too long. A caller that is cancelled cancels nothing but
        itself."""
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            self.kill("it was not ready in time")
            raise BatonError(LOST, "the mask process was not ready in time") from None
        except BatonError as error:
            raise BatonError(error.kind, error.message) from None

    def send(self, command: MaskCommand) -> None:
        """Sends a command. Raises BatonError(CONFLICT) where the process has ended."""
        try:
            if self._ended:
                raise ConnectionError
            self._writer.write(frame(command))
        except (OSError, RuntimeError):  # uvloop raises RuntimeError for a transport that it has closed
            raise BatonError(LOST, "the mask process ended") from None

    async def call(self, command: MaskCommand) -> MaskEvent:
        """Sends a command and awaits its event; a failure where the process has ended."""
        command.id = next(self._ids)
        future: asyncio.Future[MaskEvent] = asyncio.get_running_loop().create_future()
        self._calls[command.id] = future
        try:
            self.send(command)
            return await future
        finally:
            self._calls.pop(command.id, None)

    def kill(self, reason: str) -> None:
        """Kills it, and reports its end at once."""
        log.error("mask_process_killed", reason=reason)
        self.process.kill()
        self._end(None)

    async def stop(self) -> None:
        """Kills the process without reporting a failure, and awaits its end."""
        self._ended = True
        self.process.kill()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        """Handles events until the process has ended."""
        try:
            while True:
                (length,) = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
                if length > MAX_FRAME:
                    self.kill("it sent an event that is too large")
                    break
                self._handle(MaskEvent.FromString(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer.close()
            self._end(await asyncio.to_thread(self._reap))

    def _end(self, code: int | None) -> None:
        """Reports the end once, and fails what waits for the process."""
        if not self._ended:
            self._ended = True
            self._on_end(code)
        self._fail_all(BatonError(LOST, "the mask process ended"))

    def _reap(self) -> int:
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _handle(self, event: MaskEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "ready":
            if not self._ready.done():
                self._ready.set_result(None)
        elif kind == "failed" and event.id == 0:
            self._fail_all(error_of(event.failed))
        elif event.id == 0:
            self._on_event(event)
        elif (future := self._calls.get(event.id)) is not None and not future.done():
            self._answered_at = asyncio.get_running_loop().time()
            future.set_result(event)

    def _fail_all(self, error: BatonError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved, so that asyncio logs nothing if it is not awaited
        failed = MaskEvent(failed=failure_of(error))
        for future in self._calls.values():
            if not future.done():
                future.set_result(failed)


def _spawn(
    program: Sequence[str], launch: CompilerLaunch, inherited: Sequence[int]
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        tied(program),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # the front's stdout belongs to its parent protocol
        pass_fds=inherited,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(launch.model_dump_json().encode())
        process.stdin.close()
    except OSError:
        process.kill()
        process.wait()
        raise
    return process
