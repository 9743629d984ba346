"""`python -m services.masks.process`: the mask process of a worker.

    open ─▶ compiled in a thread, advanced by the output so far ─▶ answered with the mask of the next token
             with a slot: followed ─▶ each token of the output ring ─▶ the mask of the next one, computed
             together with others, on the board

Started by the worker's front (`services/masks/client.py`) with the first guided request. Its masks never pass
through front or engine interpreter on the way from one token to the next but for the engine's copy to the
device.
"""

from __future__ import annotations

import contextlib
import math
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

from llguidance import LLExecutor

from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.rings.layout import SharedRings
from baton.engine.rings.mask_board import SEVERAL, Mask, MaskBoard
from baton.engine.rings.output_ring import Finish, RingObserver
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
from services.masks.matcher import GuidedSequence, Matchers, next_masks

# Grammars that are compiled at once; the process's own thread computes masks meanwhile.
_COMPILERS = 2
# Threads of the library that compute a batch of masks, and the most masks of a batch for each of them. The
# masks of all slots are due within one decode step.
_MASK_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
_MASKS_A_THREAD = 4
# After a batch that took longer, the next masks of its sequences are computed one at a time, which identifies
# the expensive grammar.
_SLOW_S = 0.005
# How often the output ring is looked at while sequences are followed.
_POLL_S = 0.0003


@dataclass(slots=True)
class _Followed:
    """A sequence with a slot. `position`: of the token that its last mask is for. `cost_s`: seconds that its
    last mask took, or the batch that it was in; infinite before the first."""

    key: SlotKey
    sequence: GuidedSequence
    position: int
    cost_s: float = math.inf


@dataclass(eq=False)
class MaskLoop:
    """Answers the front's commands and follows the output ring, in one thread. Grammars are compiled in other
    threads; batches of masks are computed by the library's, which this one waits for."""

    channel: ProcessEnd
    matchers: Matchers
    ring: RingObserver
    board: MaskBoard
    _followed: dict[SlotKey, _Followed] = field(default_factory=dict, init=False)
    # Sequences whose grammars are being compiled, and whether they were closed meanwhile.
    _opening: dict[SlotKey, bool] = field(default_factory=dict, init=False)
    _compiled: SimpleQueue[tuple[MaskCommand, Future[tuple[GuidedSequence, Mask]]]] = field(
        default_factory=SimpleQueue, init=False
    )
    # Sequences whose next mask is to be computed: at most one of each slot, whose next token waits for it.
    _due: list[_Followed] = field(default_factory=list, init=False)
    _executor: LLExecutor = field(default_factory=partial(LLExecutor, _MASK_THREADS), init=False)
    _wakeup: Wakeup = field(default_factory=Wakeup, init=False)

    def run(self) -> None:
        """Turns until the front is gone, which raises ConnectionError."""
        self.channel.send(MaskEvent(ready=MasksReadyEvent()))
        with ThreadPoolExecutor(_COMPILERS) as pool:
            while True:
                for command in self.channel.receive():
                    self._handle(command, pool)
                self._wakeup.clear()
                while not self._compiled.empty():
                    self._answer(*self._compiled.get())
                if self._followed:
                    self._follow()
                self._compute(self._next_group())
                self.board.beat()
                timeout = 0.0 if self._due else _POLL_S if self._followed else None
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
            self._followed[key] = _Followed(key, sequence, opened.position)
        self.channel.send(MaskEvent(id=command.id, mask=mask.tobytes()))

    def _follow(self) -> None:
        """Appends the tokens that sequences have drawn since the last call; their next masks are due."""
        try:
            records = self.ring.read()
        except OverflowError:
            self._lose_all()
            return
        for record in records:
            followed = self._followed.get((record.slot, record.generation))
            if followed is None:
                continue
            if record.finish is not Finish.NONE:
                del self._followed[followed.key]
                continue
            try:
                followed.sequence.advance((record.token,))
            except BatonError as error:
                self._fail(followed.key, error)
            else:
                self._due.append(followed)

    def _next_group(self) -> list[_Followed]:
        """Takes the next batch: several cheap masks, or one expensive mask where no cheap ones are due, so
        that an expensive grammar delays others by one mask at most."""
        due = sorted(
            (one for one in self._due if self._followed.get(one.key) is one), key=lambda one: one.cost_s
        )
        cheap = sum(one.cost_s < _SLOW_S for one in due)
        count = min(cheap, _MASKS_A_THREAD * _MASK_THREADS) or 1
        self._due = due[count:]
        return due[:count]

    def _compute(self, group: list[_Followed]) -> None:
        """Computes a batch of masks and writes them to the board."""
        if not group:
            return
        # Of a batch that takes too long it is not known whose mask it is, so no sequence is blamed.
        self.board.beat(group[0].key[0] if len(group) == 1 else SEVERAL)
        began = time.perf_counter()
        masks = next_masks([one.sequence for one in group], self._executor)
        cost_s = time.perf_counter() - began
        for one, mask in zip(group, masks, strict=True):
            one.cost_s = cost_s
            if isinstance(mask, BatonError):
                self._fail(one.key, mask)
                continue
            one.position += 1
            self.board.write(*one.key, one.position, mask)

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
