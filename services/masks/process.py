"""`python -m services.masks.process`: the mask process of a worker.

    open ─▶ compiled in a thread, advanced by the output so far ─▶ answered with the mask of the next token
             with a slot: followed ─▶ each token of the output ring ─▶ the mask of the next one, computed in a
             thread, written to the board

Started by the worker's front (`services/masks/client.py`) with the first guided request. Its masks never pass
through front or engine interpreter on the way from one token to the next but for the engine's copy to the
device.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.rings.layout import SharedRings
from baton.engine.rings.mask_board import Mask, MaskBoard
from baton.engine.rings.output_ring import Finish, Record, RingObserver
from baton.errors import BatonError, ErrorKind
from baton.process_tuning import prompt_wakeups, sharpen_timers
from baton.v1.masks_pb2 import (
    MaskCommand,
    MaskEvent,
    MasksReadyEvent,
    OpenSequenceCommand,
    SequenceFailedEvent,
)
from baton.v1.types_pb2 import Failure
from services.masks.frames import ProcessEnd
from services.masks.launch import MasksLaunch, SlotKey
from services.masks.matcher import GuidedSequence, Matchers

# Grammars that are compiled at once.
_COMPILERS = 2
# Masks that are computed at once, at most one for two of the process's cores. The masks of all slots are due
# within one decode step, and one may take a millisecond; the library releases the GIL meanwhile.
_MASK_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
# How often the output ring is looked at while sequences are followed.
_POLL_S = 0.0003


@dataclass(slots=True, eq=False)
class _Followed:
    """A sequence with a slot. `position`: of the token that its last mask is for. One thread at a time uses
    it: its next token is drawn only after its mask was written."""

    sequence: GuidedSequence
    position: int
    cost_s: float = 0.0  # what its last mask took

    def next_mask(self, token: int) -> Mask:
        """Appends a drawn token; the mask of the one after it. Raises BatonError."""
        began = time.thread_time()
        self.sequence.advance((token,))
        mask = self.sequence.mask()
        self.position += 1
        self.cost_s = time.thread_time() - began
        return mask


@dataclass(eq=False)
class MaskLoop:
    """Answers the front's commands and follows the output ring. Compiling and computing masks run in threads;
    one thread does all else, and alone writes the board, where a late mask must not replace that of the
    slot's next sequence."""

    channel: ProcessEnd
    matchers: Matchers
    ring: RingObserver
    board: MaskBoard
    mask_threads: int = _MASK_THREADS
    _followed: dict[SlotKey, _Followed] = field(default_factory=dict, init=False)
    # Sequences whose grammars are being compiled, and whether they were closed meanwhile.
    _opening: dict[SlotKey, bool] = field(default_factory=dict, init=False)
    _compiled: SimpleQueue[tuple[MaskCommand, Future[tuple[GuidedSequence, Mask]]]] = field(
        default_factory=SimpleQueue, init=False
    )
    # Masks that are being computed or wait for a thread, in the order in which they are begun.
    _computing: dict[_Followed, tuple[SlotKey, Future[Mask]]] = field(default_factory=dict, init=False)
    _computed: SimpleQueue[_Followed] = field(default_factory=SimpleQueue, init=False)
    _oldest: _Followed | None = field(default=None, init=False)
    _wakeup: Wakeup = field(default_factory=Wakeup, init=False)

    def run(self) -> None:
        """Turns until the front is gone, which raises ConnectionError."""
        self.channel.send(MaskEvent(ready=MasksReadyEvent()))
        with ThreadPoolExecutor(_COMPILERS) as compilers, ThreadPoolExecutor(self.mask_threads) as threads:
            while True:
                for command in self.channel.receive():
                    self._handle(command, compilers)
                self._wakeup.clear()
                while not self._compiled.empty():
                    self._answer(*self._compiled.get())
                while not self._computed.empty():
                    self._write(self._computed.get())
                if self._followed:
                    self._follow(threads)
                self._beat()
                timeout = _POLL_S if self._followed else None
                select.select([self.channel.fileno(), self._wakeup.fileno()], [], [], timeout)

    def _handle(self, command: MaskCommand, pool: ThreadPoolExecutor) -> None:
        if command.WhichOneof("command") == "close":
            key = command.close.slot, command.close.generation
            self._followed.pop(key, None)
            if key in self._opening:
                self._opening[key] = True
            return
        opened = command.open
        if opened.follow:
            self._opening[opened.slot, opened.generation] = False
        future = pool.submit(self._open, opened)
        future.add_done_callback(partial(self._opened, command))

    def _open(self, opened: OpenSequenceCommand) -> tuple[GuidedSequence, Mask]:
        sequence = self.matchers.open(opened.grammar, opened.limits, opened.output_ids)
        return sequence, sequence.mask()

    def _opened(self, command: MaskCommand, future: Future[tuple[GuidedSequence, Mask]]) -> None:
        self._compiled.put((command, future))
        self._wakeup.set()

    def _answer(self, command: MaskCommand, future: Future[tuple[GuidedSequence, Mask]]) -> None:
        opened = command.open
        key = opened.slot, opened.generation
        closed = opened.follow and self._opening.pop(key)
        try:
            sequence, mask = future.result()
        except BatonError as error:
            self.channel.send(MaskEvent(id=command.id, failed=_failure(error)))
            return
        if opened.follow and not closed:
            if not self._followed:
                self.ring.start()
            self._followed[key] = _Followed(sequence, opened.position)
        self.channel.send(MaskEvent(id=command.id, mask=mask.tobytes()))

    def _follow(self, threads: ThreadPoolExecutor) -> None:
        """Begins a mask for each token that the followed sequences have drawn since the last call."""
        try:
            records = self.ring.read()
        except OverflowError:
            self._lose_all()
            return
        due: list[tuple[_Followed, Record]] = []
        for record in records:
            followed = self._followed.get((record.slot, record.generation))
            if followed is not None and record.finish is not Finish.NONE:
                del self._followed[record.slot, record.generation]
            elif followed is not None:
                due.append((followed, record))
        # There is at most one token of each slot, since its next one waits for this mask. Cheap grammars come
        # first, so that expensive ones do not delay them where there are fewer threads than masks.
        for followed, record in sorted(due, key=lambda one: one[0].cost_s):
            future = threads.submit(followed.next_mask, record.token)
            self._computing[followed] = (record.slot, record.generation), future
            future.add_done_callback(partial(self._wake_for, followed))

    def _wake_for(self, followed: _Followed, _: Future[Mask]) -> None:
        self._computed.put(followed)
        self._wakeup.set()

    def _write(self, followed: _Followed) -> None:
        """Writes a computed mask, if its sequence still has the slot."""
        key, future = self._computing.pop(followed)
        if self._followed.get(key) is not followed:
            return
        try:
            self.board.write(*key, followed.position, future.result())
        except BatonError as error:
            self._fail(key, error)

    def _beat(self) -> None:
        """Reports progress: that nothing is computed, or that another mask is now the oldest one."""
        oldest = next(iter(self._computing), None)
        if oldest is None:
            self.board.beat()
        elif oldest is not self._oldest:
            self.board.beat(self._computing[oldest][0][0])
        self._oldest = oldest

    def _lose_all(self) -> None:
        """Fails every sequence: tokens of theirs were missed. The router continues them."""
        missed = BatonError(ErrorKind.UNAVAILABLE, "the mask process fell behind the output")
        for key in list(self._followed):
            self._fail(key, missed)

    def _fail(self, key: SlotKey, error: BatonError) -> None:
        del self._followed[key]
        failed = SequenceFailedEvent(slot=key[0], generation=key[1], failure=_failure(error))
        self.channel.send(MaskEvent(sequence_failed=failed))


def _failure(error: BatonError) -> Failure:
    return Failure(kind=error.kind.value, message=error.message)  # type: ignore[arg-type]


def _bound_memory(most: int) -> None:
    """Bounds the address space, unless it is bounded more narrowly already."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int:
    """Runs until the front ends; the exit code is for its log only."""
    launch = MasksLaunch.model_validate_json(sys.stdin.read())
    prompt_wakeups()  # a mask that is late holds its slot for a step
    sharpen_timers()
    _bound_memory(launch.memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = ProcessEnd(socket.socket(fileno=launch.channel_fd))
    rings = SharedRings(launch.slots, launch.max_logprobs)
    board = MaskBoard(SharedMemory.attach(launch.board_fd), launch.slots, launch.vocab_size)
    with contextlib.suppress(ConnectionError):
        try:
            matchers = Matchers.of_model(Path(launch.folder))
        except BatonError as error:
            channel.send(MaskEvent(failed=_failure(error)))
            return 2
        MaskLoop(channel, matchers, rings.observer(SharedMemory.attach(launch.rings_fd)), board).run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a grammar may still be compiled
