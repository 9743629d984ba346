"""The processes around a decode loop: a minimal front, its subscriber, and processes that load the cores.

    python -m bench.decode.front reader FD SLOTS ROWS ENDED [SOCKET]
    python -m bench.decode.front subscriber SOCKET
    python -m bench.decode.front burner

reader: reads the output ring whose memory is FD. ENDED: a pipe for slot and generation, 16 bits each, of
ended sequences. SOCKET: takes length-prefixed `SubscribeResponse`s of all that a reading found, made by the
streams of a worker's front. Until stdin closes; then prints what it has read and sent as one JSON object.
subscriber: reads those messages, and checks that no token number is missing or repeated; prints tokens and
messages as one JSON object when the stream ends. burner: keeps a core busy until its parent ends.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from typing import Any, BinaryIO

from baton.base.parent_death import die_with_parent
from baton.base.process_tuning import batch_wakeups
from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import Finish, Record
from baton.v1.decode_pb2 import SubscribeResponse
from baton.v1.types_pb2 import Attempt
from services.decode.output_streams import OutputStreams

_END_S = 30.0


class Front:
    """Reads the ring in another process; `ended` returns the slots whose end it has read."""

    def __init__(
        self, fd: int, slots: int, rows_per_slot: int = 1, *, streams: bool = False, burners: int = 0
    ) -> None:
        self._ended, writer = os.pipe()
        os.set_blocking(self._ended, False)
        passed, command = [fd, writer], [str(number) for number in (fd, slots, rows_per_slot, writer)]
        self.follower: subprocess.Popen[str] | None = None
        ends: list[socket.socket] = []
        if streams:
            ends = list(socket.socketpair())
            passed.append(ends[0].fileno())
            command.append(str(ends[0].fileno()))
            self.follower = _start("subscriber", str(ends[1].fileno()), passed=[ends[1].fileno()])
        self._reader = _start("reader", *command, passed=passed)
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
        children = [self._reader] if self.follower is None else [self._reader, self.follower]
        counts: dict[str, Any] = {}
        outputs = [child.communicate(timeout=_END_S)[0] for child in children]
        os.close(self._ended)
        for child, text in zip(children, outputs, strict=True):
            if child.returncode:
                raise RuntimeError(f"{child.args!r} ended with {child.returncode}")
            counts |= json.loads(text)
        if self.follower is not None and counts["tokens_consumed"] != counts["tokens_streamed"]:
            raise RuntimeError(f"tokens were lost between front and follower: {counts}")
        return counts


def _start(role: str, *arguments: str, passed: list[int] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.decode.front", role, *arguments],
        pass_fds=passed or (),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


ENDED = struct.Struct("<HH")
LENGTH = struct.Struct("<I")
_POLL_S = 0.0002
_SWEEP_S = 0.2
_ROUTER = bytes(16)


class Outlet:
    """Streams every token as messages to one subscriber."""

    def __init__(self, follower: socket.socket) -> None:
        self.follower = follower
        self._streams = OutputStreams()
        self._streams.follow(_ROUTER)
        self._known: set[tuple[int, int]] = set()
        self._sweep_at = 0.0
        self.tokens = 0
        self.messages = 0

    def send(self, records: list[Record], steps: int) -> None:
        """Messages with all of them. A sequence's first word is what makes it known here."""
        for record in records:
            key = record.slot, record.generation
            if key not in self._known:
                self._known.add(key)
                attempt = Attempt(request_id=secrets.token_bytes(16), number=1)
                self._streams.reserve(attempt, _ROUTER, 0, *key)
            if self._streams.emit(record) is not None:
                self._known.discard(key)
            self.tokens += record.has_token
        # Until nothing is left, as a worker's front does: a message may have beginnings alone.
        while (message := self._streams.collect(_ROUTER, steps)) is not None:
            data = message.SerializeToString()
            self.follower.sendall(LENGTH.pack(len(data)) + data)
            self.messages += 1
        if time.monotonic() > self._sweep_at:
            self._streams.sweep()
            self._sweep_at = time.monotonic() + _SWEEP_S


def _read_ring() -> None:
    batch_wakeups()  # as a worker's front does
    fd, slots, rows, ended = (int(argument) for argument in sys.argv[2:6])
    outlet = Outlet(socket.socket(fileno=int(sys.argv[6]))) if len(sys.argv) > 6 else None
    reader = SharedRings(slots, rows_per_slot=rows).reader(SharedMemory.attach(fd))
    words = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        records = reader.read()
        if not records:
            time.sleep(_POLL_S)
            continue
        words += len(records)
        gone = [record for record in records if record.finish is not Finish.NONE]
        if gone:
            os.write(ended, b"".join(ENDED.pack(record.slot, record.generation) for record in gone))
        if outlet is not None:
            outlet.send(records, reader.steps)
    counts = {"words": words}
    if outlet is not None:
        counts |= {"tokens_streamed": outlet.tokens, "messages": outlet.messages}
    print(json.dumps(counts), flush=True)


def consume(source: BinaryIO) -> tuple[int, int]:
    """Counts tokens and messages. Raises RuntimeError where a sequence's numbers have a gap."""
    tokens = messages = 0
    following: dict[bytes, int] = {}
    while head := source.read(LENGTH.size):
        message = SubscribeResponse.FromString(source.read(*LENGTH.unpack(head)))
        messages += 1
        for output in message.outputs:
            request = output.attempt.request_id
            if output.first_number != following.get(request, 0):
                raise RuntimeError(f"token {output.first_number} came, {following.get(request, 0)} was next")
            following[request] = output.first_number + len(output.token_ids)
            tokens += len(output.token_ids)
            if output.finish_reason:
                del following[request]
    return tokens, messages


def _subscribe() -> None:
    with socket.socket(fileno=int(sys.argv[2])) as link, link.makefile("rb") as source:
        tokens, messages = consume(source)
    print(json.dumps({"tokens_consumed": tokens, "messages_consumed": messages}), flush=True)


def _burn() -> None:
    number = 1
    while True:
        number = number * 1103515245 + 12345 & 0x7FFFFFFF


if __name__ == "__main__":
    die_with_parent()
    {"reader": _read_ring, "subscriber": _subscribe, "burner": _burn}[sys.argv[1]]()
