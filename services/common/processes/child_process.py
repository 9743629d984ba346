"""A child process on its parent's side: started with its configuration on stdin, supervised over stdout.

A child writes a JSON line to its stdout, `{"ready": {…}}` or `{"error": {"kind", "message", "cause"}}`, then
possibly other messages; its logs go to the parent's stderr. Where its stdin stays open it receives JSON lines
there. It leads its own session, so that a signal to the parent's process group does not reach it and the
parent decides the order in which children stop. The kernel kills it when the parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.base.parent_death import tied

_READY_LINE_BYTES = 64 * 1024
# How `child_protocol.report` writes an answer.
_ANSWER = b'{"answer": '
_UNREAD_BYTES = 1024 * 1024
# How long the stdout of a child that has ended is read on; it ends at once unless another process has it
# open.
LAST_OUTPUT_S = 1.0


class ChildError(Exception):
    """A child ended without being stopped, or never became ready; the message names it and states how.
    `reported`: the last error that it reported itself; None: it reported none."""

    def __init__(self, message: str, reported: BatonError | None = None) -> None:
        super().__init__(message)
        self.reported = reported

    @property
    def replaced(self) -> bool:
        """True if it ended because a newer start of the same worker has registered."""
        return self.reported is not None and self.reported.kind is ErrorKind.CONFLICT


@dataclass(eq=False)
class Child:
    """A running child, made by `start`. Its owner must await `stop`, or call `kill` and await `ended`."""

    name: str
    _process: subprocess.Popen[bytes]
    _stdout: asyncio.StreamReader
    _pipe: asyncio.ReadTransport
    _error_prefix: str
    _on_message: Callable[[Mapping[str, Any]], None]
    _ended: asyncio.Future[int] = field(init=False)
    _reading: asyncio.Task[None] | None = field(default=None, init=False)
    _stdin: asyncio.WriteTransport | None = field(default=None, init=False)
    _last_error: BatonError | None = field(default=None, init=False)
    # How many questions it has answered, and been asked.
    answers: int = field(default=0, init=False)
    _asked: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        self._watch()

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        config: str,
        *,
        keep_stdin: bool = False,
        error_prefix: str | None = None,
        on_message: Callable[[Mapping[str, Any]], None] = lambda message: None,
    ) -> Child:
        """Starts `command` and writes the line `config` to its stdin. To be called from the main thread: the
        child is killed when the calling thread ends.

        `keep_stdin`: leaves stdin open for `send`. `error_prefix` precedes the errors that the child reports;
        None: its name. `on_message` is called with each JSON object that it writes once it is ready.
        """
        process = _spawn(command)
        assert process.stdin is not None
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        stdout = asyncio.StreamReader(limit=_READY_LINE_BYTES)
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), process.stdout)
        prefix = f"{name}: " if error_prefix is None else error_prefix
        child = cls(name, process, stdout, pipe, prefix, on_message)
        # A pipe buffers 64 KiB, far more than a configuration, so this cannot block.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(config.encode() + b"\n")
            process.stdin.flush()
        if keep_stdin:
            child._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        else:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        return child

    def send(self, message: Mapping[str, Any]) -> None:
        """Writes a JSON line to a child that was started with `keep_stdin`; never blocks. A child that does
        not read is killed before unread lines accumulate."""
        assert self._stdin is not None
        if self._stdin.get_write_buffer_size() > _UNREAD_BYTES:
            self.kill()
        elif not self._stdin.is_closing():
            self._stdin.write(json.dumps(message).encode() + b"\n")

    def ask(self) -> None:
        """Asks a child that was started with `keep_stdin` whether its event loop runs; `answers` counts."""
        self._asked += 1
        self.send({"ask": self._asked})

    async def ready(self, timeout_s: float) -> dict[str, str]:
        """Waits until the child is ready; the addresses that it reports.

        Raises the BatonError that the child reports, or ChildError where it ends, reports nothing for
        `timeout_s`, or writes anything else.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (line := await self._stdout.readline()).startswith(_ANSWER):
                    self._handle(line)
        except TimeoutError:
            raise ChildError(f"{self.name} (pid {self.pid}) was not ready in {timeout_s:g} s") from None
        except ValueError:
            line = b"(a line without end)"
        if not line:
            self.kill()  # it closed its stdout, so it has ended or will never be ready
            await self.ended()
            raise await self.death()
        addresses = self._parse(line)
        self._reading = asyncio.create_task(self._read())
        return addresses

    def _parse(self, line: bytes) -> dict[str, str]:
        try:
            message = json.loads(line)
            if "error" in message:
                raise _reported(message["error"], self._error_prefix)
            return dict(message["ready"])
        except (ValueError, KeyError, TypeError, AttributeError):
            shown = line[:80].decode(errors="replace").strip()
            raise ChildError(f"{self.name} (pid {self.pid}) wrote {shown!r} instead of ready") from None

    @property
    def has_ended(self) -> bool:
        """True once the process has ended."""
        return self._ended.done()

    async def ended(self) -> int:
        """Waits for its end; the exit status as in `Popen.returncode`."""
        return await asyncio.shield(self._ended)

    async def death(self) -> ChildError:
        """Returns an error that says how the child ended, with the last error that it reported. To be called
        after its end."""
        if self._reading:
            await asyncio.wait({self._reading}, timeout=LAST_OUTPUT_S)
        status = self._ended.result()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
        last = self._last_error
        why = "" if last is None else f": {last.message}"
        return ChildError(f"{self.name} (pid {self.pid}) {how}{why}", last)

    def terminate(self) -> None:
        """Sends SIGTERM: the first one drains the child, the second one ends it at once."""
        if not self.has_ended:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills it and all processes of its session."""
        if not self.has_ended:
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, deadline: float) -> None:
        """Drains it until `deadline` (event loop time), then kills it. Returns once it has ended."""
        self.terminate()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - loop.time())):
                await self.ended()
        self.kill()
        await self.ended()

    async def _read(self) -> None:
        """Reads the pipe to its end, so that a stray print can neither block nor break the child; handles its
        messages and remembers the last error, which may be why it ends."""
        while True:
            try:
                line = await self._stdout.readline()
            except ValueError:  # longer than the limit: dropped
                continue
            if not line:
                return
            self._handle(line)

    def _handle(self, line: bytes) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            message = json.loads(line)
            if "answer" in message:
                self.answers += 1
            elif "error" in message:
                self._last_error = _reported(message["error"])
            elif isinstance(message, dict):
                self._on_message(message)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self.pid)

        def reap() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            # Until the ended leader is reaped its process group id is not reused.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._ended.set_result(self._process.wait())
            # Asyncio's own loop does so at the pipe's end, uvloop does not.
            loop.call_later(LAST_OUTPUT_S, self._pipe.close)

        loop.add_reader(descriptor, reap)


def _reported(error: Mapping[str, Any], prefix: str = "") -> BatonError:
    """The error that a child reports. Raises KeyError for one of an unknown kind."""
    cause = FailureCause.__members__.get(str(error.get("cause", "")).upper())
    return BatonError(ErrorKind[error["kind"].upper()], f"{prefix}{error['message']}", cause=cause)


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        tied(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
