"""`python -m services.grammar.compile_process`: finds out whether grammars can be used, apart from all that
serves.

    front ─▶ this process, with the model's tokenizer ─▶ a copy of it (fork) compiles one grammar at a time
                       ◀──────────────── the grammar's source, or why it cannot be used

Compiling is where a grammar can do harm: the library's stack overflows, memory runs out, minutes pass. A copy
that crashes or exceeds its limits refuses its grammar and harms nothing else. Mask processes then compile the
same text with the same library and more room. A copy is made ahead, and is used again as long as grammars are
small and compile at once, so that a fork delays none of them.

This process has one thread, so that a fork copies no lock that another thread holds. It starts with the
first guided request, and runs at a lower priority than those that compute masks.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from baton.base.errors import BatonError, ErrorKind
from baton.base.parent_death import die_with_parent
from baton.base.process_tuning import prompt_wakeups
from baton.v1.masks_pb2 import MaskCommand, MaskEvent, MasksReadyEvent
from baton.v1.types_pb2 import Grammar
from services.grammar.frames import PREFIX, ProcessEnd, failure_of, frame
from services.grammar.grammar_source import grammar_source
from services.grammar.launch import LONG_NICE, NICE, STACK_BYTES, CompilerLaunch
from services.grammar.matcher import Matchers

# What one grammar may take to compile and to compute its first mask: seconds of processor time, bytes of
# memory, besides `STACK_BYTES`.
CPU_S = 2
MEMORY_BYTES = 64 << 20
# The seconds from which on a compilation takes long, and for which one may go on that is starved of processor
# time.
_LONG_S = 0.05
_STARVED_S = 20.0
# How long a copy may take to read its grammar, which fits its socket's buffer; how often those that have
# answered are looked at until they have ended.
_READS_S = 1.0
_REAP_S = 0.05
# Grammars for which one copy is used, and the length of those after which it is.
_USES = 64
_SMALL_CHARS = 32 << 10
_READ_BYTES = 1 << 18
_TOO_LARGE = "the grammar cannot be compiled: it is too large, or nested too deeply"
_TOO_SLOW = f"the grammar was not compiled within {CPU_S} s of processor time"


@dataclass(slots=True)
class _Copy:
    """A copy of this process: what it was given and when, until when something is to be done about it, what
    it has answered, and how many grammars it was given."""

    pid: int
    channel: socket.socket
    uses: int = 0
    command: int = 0
    given: float = math.inf
    until: float = math.inf
    answer: bytearray = field(default_factory=bytearray)

    def give(self, command: MaskCommand) -> None:
        """Has it compile a grammar. Raises OSError where it has ended, or does not read."""
        self.command, self.given = command.id, time.monotonic()
        self.until = self.given + _LONG_S
        self.uses += 1
        self.answer.clear()
        self.channel.sendall(frame(command.compile.grammar))

    @property
    def takes_long(self) -> bool:
        """True if its grammar does not compile at once."""
        return time.monotonic() >= self.given + _LONG_S

    def is_as_new(self, event: MaskEvent) -> bool:
        """True if it may be used again after this answer."""
        small = event.WhichOneof("event") == "source" and len(event.source) <= _SMALL_CHARS
        return small and not self.takes_long and self.uses < _USES

    def take_longer(self) -> None:
        """Lowers its priority, or ends it where it should have ended."""
        if self.until < self.given + _STARVED_S:
            os.setpriority(os.PRIO_PROCESS, self.pid, LONG_NICE)
            self.until = self.given + _STARVED_S
        else:
            os.kill(self.pid, signal.SIGKILL)
            self.until += _STARVED_S

    def read(self) -> bool:
        """Reads its answer as far as it has come; false once there is no more."""
        data = self.channel.recv(_READ_BYTES)
        self.answer += data
        return bool(data)

    @property
    def found(self) -> MaskEvent | None:
        """The copy's whole answer; None until it has given one."""
        size = PREFIX.size
        if len(self.answer) < size or len(self.answer) < size + PREFIX.unpack_from(self.answer)[0]:
            return None
        return MaskEvent.FromString(bytes(self.answer[size:]))

    def reap(self) -> MaskEvent:
        """Waits for the copy's end; returns what that says about the grammar."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code in (-signal.SIGKILL, -signal.SIGTERM):  # by us, by the kernel without memory, by hand
            return MaskEvent(
                failed=failure_of(BatonError(ErrorKind.CONFLICT, "the grammar's compilation was ended"))
            )
        message = _TOO_SLOW if code == -signal.SIGXCPU else _TOO_LARGE
        return MaskEvent(failed=failure_of(BatonError(ErrorKind.INVALID, message)))


class CompileLoop:
    """Answers the front's commands by copies of this process."""

    def __init__(self, channel: ProcessEnd, matchers: Matchers) -> None:
        self._channel = channel
        self._matchers = matchers
        self._idle: list[_Copy] = []
        # By the descriptor of their channel.
        self._compiling: dict[int, _Copy] = {}
        # Ids of those that are about to end, or have ended.
        self._ending: set[int] = set()

    def run(self) -> None:
        """Runs until the front is gone, which raises ConnectionError."""
        self._matchers.warm()
        gc.collect()
        gc.freeze()  # a collection would write to, and so copy, each page with an object
        self._idle.append(self._fork())
        self._channel.send(MaskEvent(ready=MasksReadyEvent()))
        while True:
            if not self._idle and all(copy.takes_long for copy in self._compiling.values()):
                with contextlib.suppress(OSError):  # no process, or no memory for one: tried again later
                    self._idle.append(self._fork())
            ready, _, _ = select.select(self._descriptors(), [], [], self._left_s())
            if self._channel.fileno() in ready:
                for command in self._channel.receive():
                    self._begin(command)
            for descriptor in list(self._compiling):
                self._advance(descriptor, answered=descriptor in ready)
            self._ending = {pid for pid in self._ending if os.waitpid(pid, os.WNOHANG) == (0, 0)}

    def _descriptors(self) -> list[int]:
        return [self._channel.fileno(), *self._compiling]

    def _left_s(self) -> float | None:
        """Seconds until something is to be done, whatever arrives; None: nothing is."""
        times = [max(0.0, copy.until - time.monotonic()) for copy in self._compiling.values()]
        return min((*times, _REAP_S)) if self._ending else min(times, default=None)

    def _begin(self, command: MaskCommand) -> None:
        while self._idle:
            copy = self._idle.pop()
            with contextlib.suppress(OSError):
                self._give(copy, command)
                return
            self._leave(copy)  # somebody has ended it, or stopped it
        try:
            self._give(self._fork(), command)
        except OSError:
            lost = BatonError(ErrorKind.CONFLICT, "no process could be started to compile the grammar in")
            self._channel.send(MaskEvent(id=command.id, failed=failure_of(lost)))

    def _give(self, copy: _Copy, command: MaskCommand) -> None:
        copy.give(command)
        self._compiling[copy.channel.fileno()] = copy

    def _advance(self, descriptor: int, *, answered: bool) -> None:
        """Reads what a copy has answered, and reports it once that is all."""
        copy = self._compiling[descriptor]
        if not answered:
            if time.monotonic() >= copy.until:
                copy.take_longer()
            return
        ended = not copy.read()
        if (event := copy.found) is None and not ended:
            return
        del self._compiling[descriptor]
        if event is None:
            copy.channel.close()
            event = copy.reap()
        elif not ended and not self._idle and copy.is_as_new(event):
            self._idle.append(copy)
        else:
            self._leave(copy)
        event.id = copy.command
        self._channel.send(event)

    def _leave(self, copy: _Copy) -> None:
        """Leaves a copy to end by itself."""
        copy.channel.close()
        self._ending.add(copy.pid)

    def _fork(self) -> _Copy:
        """A copy that waits for a grammar. Raises OSError where there can be none."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                for other in (*self._idle, *self._compiling.values()):
                    other.channel.close()  # or the other would not see when this process closes it
                ours.close()
                self._channel.close()
                _be_copy(theirs, self._matchers)
        ours.settimeout(_READS_S)
        return _Copy(pid, ours)


def _be_copy(channel: socket.socket, matchers: Matchers) -> NoReturn:
    """Compiles the grammars that arrive, one by one, until the original closes the channel; ends without
    running what the original would."""
    try:
        die_with_parent()
        _silence()
        while True:
            (length,) = PREFIX.unpack(_read(channel, PREFIX.size))
            grammar = Grammar.FromString(_read(channel, length))
            _limit()
            channel.sendall(frame(_compile(grammar, matchers)))
    finally:
        os._exit(1)


def _compile(grammar: Grammar, matchers: Matchers) -> MaskEvent:
    """Returns the answer: the grammar's source, or why it cannot be used."""
    try:
        source = grammar_source(grammar)
        matchers.check(source)
    except BatonError as error:
        return MaskEvent(failed=failure_of(error))
    except (MemoryError, RecursionError):
        return MaskEvent(failed=failure_of(BatonError(ErrorKind.INVALID, _TOO_LARGE)))
    return MaskEvent(source=source)


def _read(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := channel.recv(size - len(data))):
            raise ConnectionError("the original process has ended")
        data += part
    return bytes(data)


def _silence() -> None:
    """Discards what is written to the log: the library's messages may have parts of the grammar."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)


def _limit() -> None:
    """Bounds what this process may use for the next grammar."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    for kind, limit in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_CPU, round(time.process_time()) + CPU_S),
        (resource.RLIMIT_STACK, STACK_BYTES),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main() -> int:
    """Runs until the front ends; the exit code is for its log only."""
    launch = CompilerLaunch.model_validate_json(sys.stdin.read())
    prompt_wakeups()
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = ProcessEnd(socket.socket(fileno=launch.channel_fd))
    with contextlib.suppress(ConnectionError):
        try:
            matchers = Matchers.of_model(Path(launch.folder))
        except BatonError as error:
            channel.send(MaskEvent(failed=failure_of(error)))
            return 2
        CompileLoop(channel, matchers).run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
