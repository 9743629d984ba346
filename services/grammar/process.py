"""`python -m services.grammar.process`: the mask process of a worker.

    open ─▶ compiled in a thread, advanced by the output so far ─▶ answered with the mask of the next token
            (what comes here has been compiled once, by the compile process)
             with a slot: followed ─▶ each token of the output ring ─▶ the mask of the next one, on the board

One of those that the worker's front starts with the first guided request (`services/grammar/client.py`), each
of which follows some of the sequences. From one token to the next its masks pass through no interpreter of
front or engine, except that the engine copies them to the device.

Masks are computed one after the other. The library's threads cannot help: matchers copied from one compiled
grammar share its lexer behind a lock, and threads of Python hand the interpreter's lock to and fro.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from baton.base.errors import BatonError, ErrorKind
from baton.base.process_tuning import prompt_wakeups, sharpen_timers
from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.shared_memory.mask_board import Mask, MaskBoard
from baton.engine.shared_memory.output_ring import Finish, RingObserver
from baton.v1.masks_pb2 import (
    MaskCommand,
    MaskEvent,
    MasksReadyEvent,
    OpenSequenceCommand,
    SequenceFailedEvent,
)
from baton.v1.types_pb2 import Failure
from services.grammar.frames import ProcessEnd, failure_of
from services.grammar.launch import NICE, STACK_BYTES, MasksLaunch, SlotKey
from services.grammar.matcher import GuidedSequence, Matchers

# Grammars that are compiled at once, at a lower priority, and sequences that are opened at once of those that
# are; the process's own thread computes masks meanwhile.
_COMPILERS = 2
_OPENERS = 2
# A grammar is known to compile with half of this stack.
_STACK_BYTES = 2 * STACK_BYTES
# The share of the address space that grammars and sequences may take.
_MOST_MEMORY = 0.75
# How often the output ring is looked at while sequences are followed, and how long an iteration takes at most
# while they are opened: the front watches that there are iterations.
_POLL_S = 0.0003
_OPENING_TURN_S = 0.1


@dataclass(slots=True)
class FollowedSequence:
    """A sequence with a slot. `position`: of the token that its last mask is for. `cost_s`: seconds that its
    last mask took; infinite before the first."""

    key: SlotKey
    sequence: GuidedSequence
    position: int
    cost_s: float = math.inf


@dataclass(eq=False)
class MaskLoop:
    """Answers the front's commands and follows the output ring, in one thread. Grammars are compiled in
    others.

    `turn_s`: seconds for which masks are computed before commands and new tokens are looked at again; a mask
    that is cheap to compute waits behind one expensive mask at most."""

    channel: ProcessEnd
    matchers: Matchers
    ring: RingObserver
    board: MaskBoard
    turn_s: float = 0.001
    _followed: dict[SlotKey, FollowedSequence] = field(default_factory=dict, init=False)
    # Sequences whose grammars are being compiled, and whether they were closed meanwhile; commands that are
    # not answered.
    _opening: dict[SlotKey, bool] = field(default_factory=dict, init=False)
    _unanswered: int = field(default=0, init=False)
    _compiled: SimpleQueue[tuple[MaskCommand, Future[tuple[GuidedSequence, Mask]]]] = field(
        default_factory=SimpleQueue, init=False
    )
    # Sequences whose next mask is to be computed: at most one of each slot, whose next token waits for it.
    _due: list[FollowedSequence] = field(default_factory=list, init=False)
    _wakeup: Wakeup = field(default_factory=Wakeup, init=False)

    def run(self) -> None:
        """Runs until the front is gone, which raises ConnectionError."""
        self.channel.send(MaskEvent(ready=MasksReadyEvent()))
        command_arrived, grammar_compiled = self.channel.fileno(), self._wakeup.fileno()
        threading.stack_size(_STACK_BYTES)
        with (
            ThreadPoolExecutor(_COMPILERS, initializer=_lower_priority) as compilers,
            ThreadPoolExecutor(_OPENERS) as openers,
        ):
            while True:
                ready, _, _ = select.select([command_arrived, grammar_compiled], [], [], self._pause_s())
                if command_arrived in ready:
                    for command in self.channel.receive():
                        self._handle(command, compilers, openers)
                if grammar_compiled in ready:
                    self._wakeup.clear()
                    while not self._compiled.empty():
                        self._answer(*self._compiled.get())
                if self._followed:
                    self._follow()
                compute_due(self._due, self._followed, self._compute, self.turn_s)
                self.board.beat()

    def _pause_s(self) -> float | None:
        """Seconds until the next iteration, unless something arrives."""
        if self._due:
            return 0.0
        if self._followed:
            return _POLL_S
        return _OPENING_TURN_S if self._unanswered else None

    def _handle(
        self, command: MaskCommand, compilers: ThreadPoolExecutor, openers: ThreadPoolExecutor
    ) -> None:
        if command.WhichOneof("command") == "close":
            key = command.close.slot, command.close.generation
            self._followed.pop(key, None)
            if key in self._opening:
                self._opening[key] = True
            return
        opened = command.open
        if opened.follow:
            self._opening[opened.slot, opened.generation] = False
        self._unanswered += 1
        pool = openers if self.matchers.keeps(opened.source) else compilers
        future = pool.submit(self._open, opened)
        future.add_done_callback(partial(self._opened, command))

    def _open(self, opened: OpenSequenceCommand) -> tuple[GuidedSequence, Mask]:
        sequence = self.matchers.open(opened.source, opened.limits, opened.output_ids)
        return sequence, sequence.mask()

    def _opened(self, command: MaskCommand, future: Future[tuple[GuidedSequence, Mask]]) -> None:
        self._compiled.put((command, future))
        self._wakeup.set()

    def _answer(self, command: MaskCommand, future: Future[tuple[GuidedSequence, Mask]]) -> None:
        opened = command.open
        key = opened.slot, opened.generation
        closed = opened.follow and self._opening.pop(key)
        self._unanswered -= 1
        try:
            sequence, mask = future.result()
        except Exception as error:
            self.channel.send(MaskEvent(id=command.id, failed=_failure(error)))
            return
        if opened.follow and not closed:
            if not self._followed:
                self.ring.start()
            self._followed[key] = FollowedSequence(key, sequence, opened.position)
        self.channel.send(MaskEvent(id=command.id, mask=mask.tobytes()))

    def _follow(self) -> None:
        """Appends the tokens that sequences have drawn since the last call; their next masks are due."""
        try:
            records = self.ring.read(self._followed)
        except OverflowError:
            self._lose_all()
            return
        for record in records:
            followed = self._followed.get((record.slot, record.generation))
            if followed is None:  # it failed by one of these tokens
                continue
            if record.finish is not Finish.NONE:
                del self._followed[followed.key]
                continue
            try:
                self.board.beat(record.slot)
                followed.sequence.advance((record.token,))
            except Exception as error:
                self._fail(followed.key, error)
            else:
                self._due.append(followed)

    def _compute(self, one: FollowedSequence) -> None:
        slot, generation = one.key
        self.board.beat(slot)
        row = self.board.begin(slot)
        try:
            one.sequence.write_mask(row)
        except Exception as error:
            self._fail(one.key, error)
            return
        one.position += 1
        self.board.publish(slot, generation, one.position)

    def _lose_all(self) -> None:
        """Fails every sequence: tokens of theirs were missed. The router continues them."""
        missed = BatonError(ErrorKind.UNAVAILABLE, "the mask process fell behind the output")
        for key in list(self._followed):
            self._fail(key, missed)

    def _fail(self, key: SlotKey, error: Exception) -> None:
        del self._followed[key]
        failed = SequenceFailedEvent(slot=key[0], generation=key[1], failure=_failure(error))
        self.channel.send(MaskEvent(sequence_failed=failed))


def compute_due(
    due: list[FollowedSequence],
    followed: Mapping[SlotKey, FollowedSequence],
    compute: Callable[[FollowedSequence], None],
    turn_s: float,
) -> None:
    """Computes the due masks for one iteration of `turn_s` seconds, those first that were cheap last time,
    and takes them from `due`; those of sequences that have left their slot are dropped."""
    due.sort(key=lambda one: one.cost_s, reverse=True)
    began = now = time.perf_counter()
    while due and now - began < turn_s:
        one = due.pop()
        if followed.get(one.key) is one:
            compute(one)
        before, now = now, time.perf_counter()
        one.cost_s = now - before


def _failure(error: Exception) -> Failure:
    """Converts an error for the front. An unforeseen one, such as want of memory, is not the grammar's fault:
    the sequence may go on at another worker."""
    if not isinstance(error, BatonError):
        error = BatonError(ErrorKind.CONFLICT, f"the mask process failed: {type(error).__name__}")
    return failure_of(error)


def _lower_priority() -> None:
    """Lowers the priority of this thread alone: masks are computed first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _deepen_stack() -> None:
    """Allows this thread, in which masks are computed, as much stack as those that compile."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    most = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (most, hard))


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
    _deepen_stack()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = ProcessEnd(socket.socket(fileno=launch.channel_fd))
    board_memory = SharedMemory.attach(launch.board_fd)
    with contextlib.suppress(ConnectionError):
        try:
            board = MaskBoard(board_memory, launch.sizes.slots, launch.vocab_size, launch.process)
            ring = launch.sizes.observer(SharedMemory.attach(launch.rings_fd))
            matchers = Matchers.of_model(Path(launch.folder), int(_MOST_MEMORY * (launch.memory_mb << 20)))
        except BatonError as error:
            channel.send(MaskEvent(failed=_failure(error)))
            return 2
        MaskLoop(channel, matchers, ring, board).run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a grammar may still be compiled
