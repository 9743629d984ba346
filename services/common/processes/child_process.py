"""A child process as its parent sees it: started with its configuration on stdin, heard on stdout.

A child writes one JSON line to its stdout, `{"ready": {…}}` or `{"error": {"kind", "message"}}`, then perhaps
more of other kinds, and its logs to our stderr. One that is kept informed hears JSON lines on its stdin. It
leads a session of its own, so that a signal to our process group reaches us alone and we decide the order in
which children stop. The kernel kills it when we die, however we die.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.errors import BatonError, ErrorKind
from baton.parent_death import tied

_READY_LINE_BYTES = 64 * 1024
_UNREAD_BYTES = 1024 * 1024
# How long a dead child's pipe may take to end; it does at once, unless somebody else holds it open.
LAST_WORDS_S = 1.0


class ChildError(Exception):
    """A child ended unasked, or never said that it serves; the message names it and says how. `replaced`:
    since a newer start of the same worker has its name."""

    def __init__(self, message: str, *, replaced: bool = False) -> None:
        super().__init__(message)
        self.replaced = replaced


class Child:
    """A running child. Made by `start`; whoever started it must await `stop` or `kill`."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        stdout: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
    ) -> None:
        self.name = name
        self._process = process
        self._stdout = stdout
        self._pipe = pipe
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Task[None] | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._last_words = ""
        self._replaced = False
        # Before the errors that it reports; empty for one that reports those of others.
        self.prefix = f"{name}: "
        # Called with each JSON object that it writes once it serves.
        self.on_message: Callable[[Mapping[str, Any]], None] = lambda message: None
        self._watch()

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, name: str, command: Sequence[str], config: str, *, informed: bool = False) -> Child:
        """Starts `command` and writes the line `config` to its stdin, which stays open for `tell` if it is
        to be `informed`. Call it from a thread that lives as long as we: the child dies with it."""
        process = _spawn(command)
        assert process.stdin is not None
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        stdout = asyncio.StreamReader(limit=_READY_LINE_BYTES)
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), process.stdout)
        child = cls(name, process, stdout, pipe)
        # A pipe holds 64 KiB, far more than a configuration, so this cannot block.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(config.encode() + b"\n")
            process.stdin.flush()
        if informed:
            child._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        else:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        return child

    def tell(self, message: Mapping[str, Any]) -> None:
        """Writes a JSON line to the stdin of a child that was started `informed`; never waits. One that
        does not read is killed before its lines pile up."""
        assert self._stdin is not None
        if self._stdin.get_write_buffer_size() > _UNREAD_BYTES:
            self.kill()
        elif not self._stdin.is_closing():
            self._stdin.write(json.dumps(message).encode() + b"\n")

    async def ready(self, timeout_s: float) -> dict[str, str]:
        """What the child says of itself once it serves.

        Raises the `BatonError` that the child reports, or `ChildError` when it ends, is silent for
        `timeout_s` or speaks nonsense.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._stdout.readline()
        except TimeoutError:
            raise ChildError(f"{self.name} (pid {self.pid}) was not ready in {timeout_s:g} s") from None
        except ValueError:
            line = b"(an endless line)"
        if not line:
            self.kill()  # it closed its stdout, so it has ended or will never be ready
            await self.ended()
            raise await self.death()
        said = self._parse(line)
        self._listening = asyncio.create_task(self._listen())
        return said

    def _parse(self, line: bytes) -> dict[str, str]:
        try:
            message = json.loads(line)
            if "error" in message:
                kind = ErrorKind[message["error"]["kind"].upper()]
                raise BatonError(kind, f"{self.prefix}{message['error']['message']}")
            return dict(message["ready"])
        except (ValueError, KeyError, TypeError, AttributeError):
            shown = line[:80].decode(errors="replace").strip()
            raise ChildError(f"{self.name} (pid {self.pid}) said {shown!r} instead of ready") from None

    async def ended(self) -> int:
        """Waits for its end, whenever that is; the exit status as `Popen.returncode` has it."""
        return await asyncio.shield(self._ended)

    async def death(self) -> ChildError:
        """How it ended, in words, with what it said of it. Only after its end."""
        if self._listening:
            await asyncio.wait({self._listening}, timeout=LAST_WORDS_S)
        status = self._ended.result()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
        why = f": {self._last_words}" if self._last_words else ""
        return ChildError(f"{self.name} (pid {self.pid}) {how}{why}", replaced=self._replaced)

    def terminate(self) -> None:
        """Asks it to drain; a second time: to stop at once."""
        if not self._ended.done():
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills it and whatever it started in its session."""
        if not self._ended.done():
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, deadline: float) -> None:
        """Lets it drain until `deadline` (loop time), then kills it. Returns when it is gone."""
        self.terminate()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - loop.time())):
                await self.ended()
        self.kill()
        await self.ended()

    async def _listen(self) -> None:
        """Keeps the pipe empty, so that a stray print can neither block nor break the child; passes its
        messages on, and keeps in mind the last error, which may be what it dies of."""
        while True:
            try:
                line = await self._stdout.readline()
            except ValueError:  # longer than the limit: dropped
                continue
            if not line:
                return
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            message = json.loads(line)
            if "error" in message:
                self._last_words = str(message["error"]["message"])
                self._replaced = message["error"]["kind"] == ErrorKind.CONFLICT.name.lower()
            elif isinstance(message, dict):
                self.on_message(message)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self.pid)

        def reap() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            # While the dead leader is unreaped its process group cannot be anyone else's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._ended.set_result(self._process.wait())
            # Asyncio's own loop does so at the pipe's end, uvloop never would.
            loop.call_later(LAST_WORDS_S, self._pipe.close)

        loop.add_reader(descriptor, reap)


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        tied(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
