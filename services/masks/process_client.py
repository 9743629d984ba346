"""The front's side of one mask process: starts it with the first call, and again where it ended.

A process that computes one mask for too long is killed. Only its guided sequences notice: they fail with
CONFLICT, and the router continues them with another attempt, whose grammar is advanced by the output so
far. The sequence that was computed for, and a grammar that was being compiled too long, fail with INVALID:
the client's fault.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.device.shared_memory import SharedMemory
from baton.engine.rings.mask_board import MaskBoard
from baton.errors import BatonError, ErrorKind
from baton.parent_death import tied
from baton.process_stat import process_stat
from baton.python_module import python_module
from baton.v1.masks_pb2 import CloseSequenceCommand, MaskCommand, MaskEvent, OpenSequenceCommand
from baton.v1.types_pb2 import Failure, Grammar, Limits
from services.common.observability.logs import get_log
from services.masks.frames import MAX_FRAME, PREFIX, frame
from services.masks.launch import MasksLaunch, SlotKey

PROGRAM: tuple[str, ...] = python_module("services.masks.process")
# The longest that a grammar may be compiled, and one mask may take; a process that did not run for half of
# it was starved, and its grammar is not to blame.
COMPILE_S = 4.0
HUNG_S = 2.0
# The longest that a process may be starved within one mask.
_STARVED_S = 20.0
# The kind of error after which a router tries again, and goes on using the worker for others.
LOST = ErrorKind.CONFLICT
_START_S = 60.0
_WATCH_S = 0.25
_STOP_S = 2.0

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class MaskSetup:
    """What a worker's mask processes are started with: the model's folder and vocabulary, the memory of the
    rings and of the mask board, the slots and logprobs that these are made for, and how many processes."""

    folder: Path
    vocab_size: int
    slots: int
    max_logprobs: int
    rings: SharedMemory
    board: SharedMemory
    memory_mb: int = 4096
    processes: int = 1


@dataclass(eq=False)
class MaskProcessClient:
    """Calls of one front to one process. To be used within its event loop."""

    setup: MaskSetup
    # The process's number among those of the worker.
    number: int
    # Called where a sequence that is followed cannot continue: slot, generation, why.
    on_failed: Callable[[int, int, BatonError], None]
    program: Sequence[str] = PROGRAM
    # Grammars that were compiled, and those that were refused or failed; processes that ended.
    opened: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    restarts: int = field(default=0, init=False)
    _running: _Running | None = field(default=None, init=False)
    # Why no process can compute masks for this model.
    _refusal: BatonError | None = field(default=None, init=False)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _followed: set[SlotKey] = field(default_factory=set, init=False)

    @property
    def pid(self) -> int | None:
        """The process's id, while it runs."""
        return None if self._running is None else self._running.process.pid

    @property
    def ready(self) -> bool:
        """Whether a call would be answered without a start of the process."""
        return self._running is not None and self._running.ready.done()

    @property
    def followed(self) -> int:
        """Sequences whose masks are computed."""
        return len(self._followed)

    def follows(self, key: SlotKey) -> bool:
        """Whether the masks of that sequence are computed, or will be."""
        return key in self._followed

    @property
    def load(self) -> int:
        """Sequences, and calls that wait for an answer."""
        return len(self._followed) + (0 if self._running is None else self._running.calls)

    async def start(self) -> None:
        """Starts the process, unless it runs. Raises BatonError: INVALID where it cannot compute masks for
        this model, CONFLICT where it ended."""
        await self._started()

    async def next_mask(self, grammar: Grammar, limits: Limits, output_ids: Sequence[int]) -> bytes:
        """`MaskClient.next_mask`, by this process."""
        return await self._open(OpenSequenceCommand(grammar=grammar, limits=limits, output_ids=output_ids))

    async def follow(
        self,
        key: SlotKey,
        position: int,
        grammar: Grammar,
        limits: Limits,
        output_ids: Sequence[int],
    ) -> None:
        """`MaskClient.follow`, of a sequence that is not followed yet."""
        slot, generation = key
        self._followed.add(key)
        command = OpenSequenceCommand(
            grammar=grammar,
            limits=limits,
            output_ids=output_ids,
            follow=True,
            slot=slot,
            generation=generation,
            position=position,
        )
        try:
            await self._open(command)
        except BaseException:
            self.close(key)
            raise

    def close(self, key: SlotKey) -> None:
        """Ends following; nothing where the slot is not followed."""
        if key in self._followed:
            self._followed.discard(key)
            if self._running is not None:
                slot, generation = key
                self._running.send(MaskCommand(close=CloseSequenceCommand(slot=slot, generation=generation)))

    def ended(self, key: SlotKey) -> None:
        """The slot's last token was read from the ring; the process has seen it too."""
        self._followed.discard(key)

    async def stop(self) -> None:
        """Ends the process."""
        if self._running is not None:
            await self._running.stop()

    async def _open(self, command: OpenSequenceCommand) -> bytes:
        running = await self._started()
        before = running.cpu_s
        try:
            async with asyncio.timeout(COMPILE_S):
                event = await running.call(MaskCommand(open=command))
        except TimeoutError:
            self.failed += 1
            if running.answered_within(COMPILE_S):
                raise BatonError(LOST, "too many grammars wait to be compiled") from None
            computed = running.cpu_s - before > COMPILE_S / 2
            running.kill("a grammar was compiled for too long")
            message = f"the grammar was not compiled within {COMPILE_S:g} s"
            raise BatonError(ErrorKind.INVALID if computed else LOST, message) from None
        if event.WhichOneof("event") == "failed":
            self.failed += 1
            raise _error(event.failed)
        self.opened += 1
        return event.mask

    async def _started(self) -> _Running:
        """The process, started if need be."""
        async with self._starting:
            if self._refusal is not None:
                raise BatonError(self._refusal.kind, self._refusal.message)
            if self._running is None:
                running = await _Running.start(
                    self.setup, self.number, self.program, self._on_failed, self._on_end
                )
                self._running = running
                try:
                    async with asyncio.timeout(_START_S):
                        await running.ready
                except TimeoutError:
                    running.kill("it was not ready in time")
                    raise BatonError(LOST, "the mask process was not ready in time") from None
                except BatonError as error:
                    self._refusal = error if error.kind is ErrorKind.INVALID else None
                    raise
            return self._running

    def _on_failed(self, key: SlotKey, error: BatonError) -> None:
        if key in self._followed:
            self._followed.discard(key)
            self.failed += 1
            self.on_failed(*key, error)

    def _on_end(self, computing: int) -> None:
        """The process has ended; `computing`: the slot that it was computing for when it was killed."""
        self._running = None
        self.restarts += 1
        log.warning("mask_process_ended", sequences=len(self._followed))
        for key in list(self._followed):
            if key[0] == computing:
                error = BatonError(ErrorKind.INVALID, f"one mask of the grammar took more than {HUNG_S:g} s")
            else:
                error = BatonError(LOST, "the mask process ended")
            self._on_failed(key, error)


class _Running:
    """One start of the process."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        board: MaskBoard,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        on_failed: Callable[[SlotKey, BatonError], None],
        on_end: Callable[[int], None],
    ) -> None:
        self.process = process
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._board = board
        self._reader, self._writer = streams
        self._on_failed = on_failed
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[MaskEvent]] = {}
        self._ended = False
        self._answered_at = -math.inf
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @classmethod
    async def start(
        cls,
        setup: MaskSetup,
        number: int,
        program: Sequence[str],
        on_failed: Callable[[SlotKey, BatonError], None],
        on_end: Callable[[int], None],
    ) -> _Running:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            launch = MasksLaunch(
                folder=str(setup.folder),
                vocab_size=setup.vocab_size,
                slots=setup.slots,
                max_logprobs=setup.max_logprobs,
                channel_fd=theirs.fileno(),
                rings_fd=setup.rings.fd,
                board_fd=setup.board.fd,
                memory_mb=setup.memory_mb,
                process=number,
            )
            board = MaskBoard(setup.board, setup.slots, setup.vocab_size, number)
            board.beat()  # the last process may have been killed while it computed
            process = _spawn(program, launch)
        streams = await asyncio.open_unix_connection(sock=ours)
        log.info("mask_process_started", pid=process.pid)
        return cls(process, board, streams, on_failed, on_end)

    @property
    def calls(self) -> int:
        """Calls that wait for an answer."""
        return len(self._calls)

    def answered_within(self, seconds: float) -> bool:
        """Whether it has answered a call so recently."""
        return asyncio.get_running_loop().time() - self._answered_at < seconds

    def send(self, command: MaskCommand) -> None:
        self._writer.write(frame(command))

    async def call(self, command: MaskCommand) -> MaskEvent:
        """Sends a command and awaits its event; a failure where the process has ended."""
        command.id = next(self._ids)
        future: asyncio.Future[MaskEvent] = asyncio.get_running_loop().create_future()
        self._calls[command.id] = future
        self.send(command)
        try:
            return await future
        finally:
            self._calls.pop(command.id, None)

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that it has used."""
        stat = process_stat(self.process.pid)
        return stat.cpu_s if stat else 0.0

    def kill(self, reason: str) -> None:
        """Kills it, and reports its end at once."""
        log.error("mask_process_killed", reason=reason)
        computing = self._board.computing
        self.process.kill()
        self._end(computing)

    async def stop(self) -> None:
        """Kills the process without reporting a failure, and awaits its tasks."""
        self._ended = True
        self.process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
            self._end(-1)
            await asyncio.to_thread(self._reap)

    def _end(self, computing: int) -> None:
        """Fails what waits for the process, and reports its end once."""
        self._fail_all(BatonError(LOST, "the mask process ended"))
        if not self._ended:
            self._ended = True
            self._on_end(computing)

    def _reap(self) -> None:
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _handle(self, event: MaskEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "ready":
            self.ready.set_result(None)
        elif kind == "sequence_failed":
            failed = event.sequence_failed
            self._on_failed((failed.slot, failed.generation), _error(failed.failure))
        elif kind == "failed" and event.id == 0:
            self._fail_all(_error(event.failed))
        elif (future := self._calls.get(event.id)) is not None and not future.done():
            self._answered_at = asyncio.get_running_loop().time()
            future.set_result(event)

    def _fail_all(self, error: BatonError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # retrieved, so that asyncio logs nothing if it is not awaited
        failed = MaskEvent(failed=Failure(kind=error.kind.value, message=error.message))  # type: ignore[arg-type]
        for future in self._calls.values():
            if not future.done():
                future.set_result(failed)

    async def _watch(self) -> None:
        """Kills the process once a mask takes too long; ends with it."""
        beats, since, cpu_s = -1, 0.0, 0.0
        loop = asyncio.get_running_loop()
        while self.process.poll() is None:
            if self._board.computing < 0 or self._board.beats != beats:
                beats, since, cpu_s = self._board.beats, loop.time(), self.cpu_s
            elif (waited := loop.time() - since) > HUNG_S and (
                waited > _STARVED_S or self.cpu_s - cpu_s > HUNG_S / 2
            ):
                self.kill("it computed one mask for too long")
                return
            await asyncio.sleep(_WATCH_S)


def _spawn(program: Sequence[str], launch: MasksLaunch) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        tied(program),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # the front's stdout belongs to its parent protocol
        pass_fds=(launch.channel_fd, launch.rings_fd, launch.board_fd),
    )
    assert process.stdin is not None
    process.stdin.write(launch.model_dump_json().encode())
    process.stdin.close()
    return process


def _error(failure: Failure) -> BatonError:
    return BatonError(ErrorKind(failure.kind), failure.message)
