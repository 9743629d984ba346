"""A child process that answers requests, one line of JSON each."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import Any

_END_S = 10.0
# Loading a model and capturing its graphs take long.
_ANSWER_S = 300.0


class JsonLinesProcess:
    """Runs `python -m MODULE …`; `ready_line` is its first line. It ends when its stdin is closed."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self._unread = b""
        try:
            self.ready_line = self.receive()
        except (RuntimeError, TimeoutError):
            self.end()
            raise

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        self.send_command(request)
        return self.receive()

    def send_command(self, command: dict[str, Any]) -> None:
        """Sends a message without waiting for an answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Reads the next line. Raises RuntimeError where the process has ended, TimeoutError where no line
        arrives."""
        deadline = time.monotonic() + _ANSWER_S
        while not self.has_line(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.process.args!r} has not answered for {_ANSWER_S:g} s")
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def has_line(self, within_s: float) -> bool:
        """Whether a line is available within so many seconds."""
        assert self.process.stdout is not None
        if b"\n" in self._unread:
            return True
        if select.select([self.process.stdout], [], [], within_s)[0]:
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait(_END_S)}")
            self._unread += part
        return b"\n" in self._unread

    def end(self) -> None:
        """Closes its stdin and waits. Raises subprocess.TimeoutExpired where it had to be killed."""
        try:
            self.process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
