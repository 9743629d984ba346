"""The front's side of one mask process: starts it with the first call, and again where it ended.

A process that hangs or computes one mask for too long is killed. Only its guided sequences notice: they fail
with CONFLICT, and the router continues them with another attempt, whose grammar is advanced by the output so
far. The sequence that was computed for when the process crashed or was killed fails with INVALID: the
client's fault. Its grammar is refused from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from baton.base.process_watch import ProcessWatch
from baton.base.python_module import python_module
from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mask_board import NO_TAG, MaskBoard
from baton.v1.masks_pb2 import CloseSequenceCommand, MaskCommand, MaskEvent, OpenSequenceCommand
from baton.v1.types_pb2 import Limits
from services.common.observability.logs import get_log
from services.grammar.channel_process import LOST, ChannelProcess
from services.grammar.frames import error_of
from services.grammar.launch import MasksLaunch, SlotKey

PROGRAM: tuple[str, ...] = python_module("services.grammar.process")
# The longest that a sequence may take to open, and one mask or the time between two iterations of the
# process; one that was starved meanwhile is not to blame.
OPEN_S = 4.0
HUNG_S = 2.0
_WATCH_S = 0.25
# How a process ends that a grammar has crashed. One that lacks memory aborts, whichever grammar asked last.
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE})

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class MaskSetup:
    """Settings that a worker's mask processes start with: the model's folder and vocabulary, the sizes and
    the memory of the rings and of the mask board, and how many processes."""

    folder: Path
    vocab_size: int
    sizes: SharedRings
    rings: SharedMemory
    board: SharedMemory
    memory_mb: int = 4096
    processes: int = 1


def _ignore(source: str, error: BatonError) -> None:
    pass


@dataclass(eq=False)
class MaskProcessClient:
    """Calls of one front to one process. To be used within its event loop."""

    setup: MaskSetup
    # The process's number among those of the worker.
    number: int
    # Called where a sequence that is followed cannot continue: slot, generation, why.
    on_failed: Callable[[int, int, BatonError], None]
    program: Sequence[str] = PROGRAM
    # Called where a grammar has ended the process: its source, why it is refused from now on.
    on_refused: Callable[[str, BatonError], None] = _ignore
    # Grammars that sequences were opened of, and those that failed; processes that ended.
    opened: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    restarts: int = field(default=0, init=False)
    _running: ChannelProcess | None = field(default=None, init=False)
    # Why no process can compute masks for this model.
    _refusal: BatonError | None = field(default=None, init=False)
    # Held while a process is started, not until it is ready.
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _board: MaskBoard = field(init=False)
    # The grammars of sequences that are followed, and of those that are being opened, by the call.
    _followed: dict[SlotKey, str] = field(default_factory=dict, init=False)
    _opening: dict[object, str] = field(default_factory=dict, init=False)
    _watching: asyncio.Task[None] | None = field(default=None, init=False)
    # The slot whose mask took too long when the process was killed.
    _hung_slot: int = field(default=NO_TAG, init=False)

    def __post_init__(self) -> None:
        setup = self.setup
        self._board = MaskBoard(setup.board, setup.sizes.slots, setup.vocab_size, self.number)

    @property
    def pid(self) -> int | None:
        """The process's id, while it runs."""
        return None if self._running is None else self._running.process.pid

    @property
    def ready(self) -> bool:
        """True if a call would be answered without a start of the process."""
        return self._running is not None and self._running.ready

    @property
    def followed(self) -> int:
        """Sequences whose masks are computed."""
        return len(self._followed)

    def follows(self, key: SlotKey) -> bool:
        """True if the masks of that sequence are computed, or will be."""
        return key in self._followed

    @property
    def load(self) -> int:
        """Sequences, and calls that wait for an answer."""
        return len(self._followed) + (0 if self._running is None else self._running.calls)

    async def start(self) -> None:
        """Starts the process, unless it runs. Raises BatonError: INVALID where it cannot compute masks for
        this model, CONFLICT where it cannot be started or has ended."""
        await self._started()

    async def next_mask(self, source: str, limits: Limits, output_ids: Sequence[int]) -> bytes:
        """Answers `MaskClient.next_mask` by this process."""
        return await self._open(OpenSequenceCommand(source=source, limits=limits, output_ids=output_ids))

    async def follow(
        self, key: SlotKey, position: int, source: str, limits: Limits, output_ids: Sequence[int]
    ) -> None:
        """Runs `MaskClient.follow` for a sequence that is not followed yet."""
        slot, generation = key
        self._followed[key] = source
        command = OpenSequenceCommand(
            source=source,
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
        """Ends following; does nothing if the slot is not followed."""
        if self._followed.pop(key, None) is not None and self._running is not None:
            slot, generation = key
            with contextlib.suppress(BatonError):
                self._running.send(MaskCommand(close=CloseSequenceCommand(slot=slot, generation=generation)))

    def ended(self, key: SlotKey) -> None:
        """Ends the masks of a slot whose last token was read from the ring; the process has seen it too."""
        self._followed.pop(key, None)

    async def stop(self) -> None:
        """Ends the process and its watch."""
        if self._watching is not None:
            self._watching.cancel()
        if self._running is not None:
            await self._running.stop()

    async def _open(self, command: OpenSequenceCommand) -> bytes:
        running = await self._started()
        before, call = running.cpu_s, object()
        self._opening[call] = command.source
        try:
            async with asyncio.timeout(OPEN_S):
                event = await running.call(MaskCommand(open=command))
        except TimeoutError:
            self.failed += 1
            computed = running.cpu_s - before > OPEN_S / 2
            if running.answered_within(OPEN_S) or not computed:
                raise BatonError(LOST, "too many guided outputs wait to begin") from None
            error = BatonError(ErrorKind.INVALID, f"the grammar took more than {OPEN_S:g} s to apply")
            self.on_refused(command.source, error)
            running.kill("a grammar took too long")
            raise error from None
        finally:
            del self._opening[call]
        if event.WhichOneof("event") == "failed":
            self.failed += 1
            raise error_of(event.failed)
        self.opened += 1
        return event.mask

    async def _started(self) -> ChannelProcess:
        """The process, started if need be."""
        async with self._starting:
            if self._refusal is not None:
                raise BatonError(self._refusal.kind, self._refusal.message)
            if self._running is None:
                self._running = await self._start()
            running = self._running
        try:
            await running.until_ready()
        except BatonError as error:
            self._refusal = error if error.kind is ErrorKind.INVALID else None
            raise
        return running

    async def _start(self) -> ChannelProcess:
        setup = self.setup
        self._board.beat()  # the last process may have been killed while it computed

        def launch(channel_fd: int) -> MasksLaunch:
            return MasksLaunch(
                folder=str(setup.folder),
                vocab_size=setup.vocab_size,
                sizes=setup.sizes,
                channel_fd=channel_fd,
                rings_fd=setup.rings.fd,
                board_fd=setup.board.fd,
                memory_mb=setup.memory_mb,
                process=self.number,
            )

        inherited = setup.rings.fd, setup.board.fd
        running = await ChannelProcess.start(self.program, launch, inherited, self._on_event, self._on_end)
        self._watching = asyncio.create_task(self._watch(running))
        return running

    def _on_event(self, event: MaskEvent) -> None:
        failed = event.sequence_failed
        self._on_failed((failed.slot, failed.generation), error_of(failed.failure))

    def _on_failed(self, key: SlotKey, error: BatonError) -> None:
        if self._followed.pop(key, None) is not None:
            self.failed += 1
            self.on_failed(*key, error)

    def _on_end(self, code: int | None) -> None:
        """The process has ended by itself, or was killed by this one (None). What it computed for is to blame
        where that took too long, or crashed it."""
        self._running = None
        self.restarts += 1
        log.warning("mask_process_ended", sequences=len(self._followed), code=code)
        crashed, opening = code in _CRASHES, set(self._opening.values())
        slot, self._hung_slot = self._board.computing if crashed else self._hung_slot, NO_TAG
        took = "crashed the mask process" if crashed else f"took more than {HUNG_S:g} s for one mask"
        blamed = BatonError(ErrorKind.INVALID, f"the grammar {took}")
        if crashed and slot == NO_TAG and len(opening) == 1:
            self.on_refused(opening.pop(), blamed)
        for key, source in list(self._followed.items()):
            if key[0] == slot:
                self.on_refused(source, blamed)
            self._on_failed(key, blamed if key[0] == slot else BatonError(LOST, "the mask process ended"))

    async def _watch(self, running: ChannelProcess) -> None:
        """Kills the process where it makes no progress though there is something to do; ends with it.

        While sequences are followed or opened it iterates all the time, and counts iterations and masks. A
        grammar is to blame only if its mask was computed meanwhile, not if the process was stopped or
        starved.
        """
        watch, beats, cpu_s = ProcessWatch(running.process.pid), -1, 0.0
        while running is self._running:
            idle = not self._followed and not running.calls
            if idle or not running.ready or self._board.beats != beats:
                beats, cpu_s = self._board.beats, running.cpu_s
                watch.progressed()
            else:
                watch.look()
            if watch.hangs(HUNG_S):
                computed = running.cpu_s - cpu_s > HUNG_S / 2
                self._hung_slot = self._board.computing if computed else NO_TAG
                hangs = self._hung_slot == NO_TAG
                running.kill("it hangs" if hangs else "it computed one mask for too long")
                return
            await asyncio.sleep(_WATCH_S)
