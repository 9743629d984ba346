"""The front's side of the compile process, and what it has found out about grammars.

A tenant's grammars are compiled one after the other, each once; others do not wait for them. What was found
is remembered, refusals too, up to a number of bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.base.bounded_cache import BoundedCache
from baton.base.errors import BatonError, ErrorKind
from baton.base.process_stat import process_stat
from baton.base.python_module import python_module
from baton.v1.masks_pb2 import CompileCommand, MaskCommand, MaskEvent
from baton.v1.types_pb2 import Grammar
from services.common.observability.logs import get_log
from services.grammar.channel_process import LOST, ChannelProcess
from services.grammar.frames import error_of
from services.grammar.launch import CompilerLaunch

COMPILE_PROGRAM: tuple[str, ...] = python_module("services.grammar.compile_process")
# How long a request waits for its grammar once the compile process has started.
WAIT_S = 4.0
# Tenants whose grammars are compiled at once, each in a process of at most 64 MiB; and requests of one tenant
# that wait for their turn.
_AT_ONCE = 8
_MOST_WAITING = 256
# What is remembered of grammars: bytes of their text and messages, and of all that is kept beside a text.
KNOWN_BYTES = 8 << 20
_ENTRY_BYTES = 256
_REFUSED_SOURCES = 1024
# Seconds without an answer after which the process is killed; it ends what it compiles after 20 s itself.
_SILENT_S = 25.0
STOPPED_S = 2.0
_WATCH_S = 0.25

log = get_log(__name__)


@dataclass(slots=True)
class _Turn:
    """A tenant's turn to compile: held while one of its grammars is compiled."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


KnownGrammars = BoundedCache[bytes, str | BatonError]
"""Results of compilations by the grammars' digests: a source or a refusal."""


class GrammarCompiler:
    """Finds out whether grammars can be used. To be used within one event loop."""

    def __init__(
        self,
        folder: Path,
        program: Sequence[str] = COMPILE_PROGRAM,
        known_bytes: int = KNOWN_BYTES,
        stopped_s: float = STOPPED_S,
        wait_s: float = WAIT_S,
    ) -> None:
        """`folder`: the model's."""
        self._stopped_s = stopped_s
        self._wait_s = wait_s
        self._folder = folder
        self._program = program
        self.known = KnownGrammars(known_bytes, _known_bytes)
        # Grammars that were refused; processes that ended.
        self.refused = 0
        self.restarts = 0
        self._turns: dict[str, _Turn] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[str | BatonError]] = set()
        self._running: ChannelProcess | None = None
        self._refusal: BatonError | None = None
        self._starting = asyncio.Lock()
        # By the digest of their source, those that ended a mask process later on.
        self._refused_sources: OrderedDict[bytes, BatonError] = OrderedDict()

    @property
    def pid(self) -> int | None:
        """The process's id, while it runs."""
        return None if self._running is None else self._running.process.pid

    async def source(self, tenant: str, grammar: Grammar) -> str:
        """The grammar in llguidance's terms, compiled before unless it is known. Raises BatonError: INVALID
        where it cannot be used; CONFLICT where that was not found out: the process ended or cannot be
        started, or the tenant's other grammars took too long."""
        key = _digest(grammar.SerializeToString(deterministic=True))
        if (found := self.known.get(key)) is None:
            await self._started()  # which takes as long as to load a tokenizer
            try:
                async with asyncio.timeout(self._wait_s):
                    found = await self._compiled(tenant, key, grammar)
            except TimeoutError:
                raise BatonError(
                    LOST, f"the grammar's turn to be compiled did not come within {self._wait_s:g} s"
                ) from None
        if isinstance(found, BatonError):
            self.refused += 1
            raise BatonError(found.kind, found.message)
        if (refusal := self.refusal(found)) is not None:
            self.refused += 1
            raise refusal
        return found

    def refuse(self, source: str, error: BatonError) -> None:
        """Refuses a grammar from now on that ended a mask process."""
        self._refused_sources[_digest(source.encode())] = error
        if len(self._refused_sources) > _REFUSED_SOURCES:
            self._refused_sources.popitem(last=False)

    def refusal(self, source: str) -> BatonError | None:
        """Says why a grammar that compiles is refused all the same, if it is."""
        if not self._refused_sources:
            return None
        error = self._refused_sources.get(_digest(source.encode()))
        return None if error is None else BatonError(error.kind, error.message)

    async def start(self) -> None:
        """Starts the process, unless it runs. Raises BatonError as `source` does."""
        await self._started()

    async def stop(self) -> None:
        """Ends the compile process and its waiting calls."""
        for task in self._tasks:
            task.cancel()
        if self._running is not None:
            await self._running.stop()

    async def _compiled(self, tenant: str, key: bytes, grammar: Grammar) -> str | BatonError:
        """Compiles in the tenant's turn; returns the source or the refusal."""
        turn = self._turns.setdefault(tenant, _Turn())
        if turn.users >= _MOST_WAITING:
            raise BatonError(LOST, "too many grammars of the tenant wait to be compiled")
        turn.users += 1
        try:
            await turn.lock.acquire()
        except BaseException:
            self._leave(tenant, turn)
            raise
        if (found := self.known.get(key)) is not None:
            turn.lock.release()
            self._leave(tenant, turn)
            return found
        # It ends by itself, whether or not its request still waits: otherwise who leaves at once and comes
        # back would have any number compiled at a time.
        task = asyncio.create_task(self._compile(tenant, turn, key, grammar))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def _compile(self, tenant: str, turn: _Turn, key: bytes, grammar: Grammar) -> str | BatonError:
        try:
            async with self._places:
                running = await self._started()
                event = await _answer(
                    running, MaskCommand(compile=CompileCommand(grammar=grammar)), self._stopped_s
                )
            found = error_of(event.failed) if event.WhichOneof("event") == "failed" else event.source
            if isinstance(found, str) or found.kind is ErrorKind.INVALID:
                self.known.put(key, found)
            return found
        finally:
            turn.lock.release()
            self._leave(tenant, turn)

    def _leave(self, tenant: str, turn: _Turn) -> None:
        turn.users -= 1
        if turn.users == 0:
            self._turns.pop(tenant, None)

    def _done(self, task: asyncio.Task[str | BatonError]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: its request may have left

    async def _started(self) -> ChannelProcess:
        """The process, started if need be."""
        async with self._starting:
            if self._refusal is not None:
                raise BatonError(self._refusal.kind, self._refusal.message)
            if self._running is None:
                self._running = await ChannelProcess.start(
                    self._program, self._launch, (), lambda event: None, self._on_end
                )
            running = self._running
        try:
            await running.until_ready()
        except BatonError as error:
            self._refusal = error if error.kind is ErrorKind.INVALID else None
            raise
        return running

    def _launch(self, channel_fd: int) -> CompilerLaunch:
        return CompilerLaunch(folder=str(self._folder), channel_fd=channel_fd)

    def _on_end(self, code: int | None) -> None:
        self._running = None
        self.restarts += 1
        log.warning("compile_process_ended", code=code)


async def _answer(running: ChannelProcess, command: MaskCommand, most_stopped_s: float) -> MaskEvent:
    """The process's answer. Kills it where none comes, or it is stopped for so long: it only waits for copies
    of itself, and never computes."""
    call = asyncio.create_task(running.call(command))
    stopped_s = waited_s = 0.0
    try:
        while not (await asyncio.wait((call,), timeout=_WATCH_S))[0]:
            waited_s += _WATCH_S
            stat = process_stat(running.process.pid)
            stopped_s = stopped_s + _WATCH_S if stat is not None and stat.state in "Tt" else 0.0
            if waited_s > _SILENT_S or stopped_s > most_stopped_s:
                running.kill("the compile process hangs")
        return call.result()
    finally:
        call.cancel()


def _known_bytes(key: bytes, found: str | BatonError) -> int:
    """Memory of a known grammar, at four bytes a character, the most that Python takes."""
    return _ENTRY_BYTES + 4 * len(found.message if isinstance(found, BatonError) else found)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
