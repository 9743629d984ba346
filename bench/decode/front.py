"""The processes around a decode loop: its front, a subscriber, and processes that load the cores."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

from bench.decode.ring_reader import ENDED

_END_S = 30.0


class Front:
    """Reads the ring in another process; `ended` returns the slots whose end it has read."""

    def __init__(self, fd: int, slots: int, *, streams: bool = False, burners: int = 0) -> None:
        self._ended, writer = os.pipe()
        os.set_blocking(self._ended, False)
        passed, command = [fd, writer], [str(fd), str(slots), str(writer)]
        self._follower: subprocess.Popen[str] | None = None
        ends: list[socket.socket] = []
        if streams:
            ends = list(socket.socketpair())
            passed.append(ends[0].fileno())
            command.append(str(ends[0].fileno()))
            self._follower = _start("token_consumer", str(ends[1].fileno()), passed=[ends[1].fileno()])
        self._reader = _start("ring_reader", *command, passed=passed)
        self._burners = [_start("burner") for _ in range(burners)]
        os.close(writer)
        for end in ends:
            end.close()
        self._rest = b""

    def ended(self) -> list[tuple[int, int]]:
        """Slot and generation of sequences that ended since the last call; never waits. Raises RuntimeError
        where the front died."""
        try:
            data = os.read(self._ended, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise RuntimeError("the reader of the ring has ended")
        data = self._rest + data
        whole = len(data) // ENDED.size * ENDED.size
        self._rest = data[whole:]
        return list(ENDED.iter_unpack(data[:whole]))

    def close(self) -> dict[str, Any]:
        """Ends all processes; returns counts of what was read, streamed and consumed. Raises RuntimeError
        where tokens were lost."""
        for burner in self._burners:
            burner.kill()
            burner.communicate()
        # The front's end is what ends the follower.
        children = [self._reader] if self._follower is None else [self._reader, self._follower]
        counts: dict[str, Any] = {}
        outputs = [child.communicate(timeout=_END_S)[0] for child in children]
        os.close(self._ended)
        for child, text in zip(children, outputs, strict=True):
            if child.returncode:
                raise RuntimeError(f"{child.args!r} ended with {child.returncode}")
            counts |= json.loads(text)
        if self._follower is not None and counts["tokens_consumed"] != counts["tokens_streamed"]:
            raise RuntimeError(f"tokens were lost between front and follower: {counts}")
        return counts


def _start(module: str, *arguments: str, passed: list[int] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"bench.decode.{module}", *arguments],
        pass_fds=passed or (),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
