"""A minimal front: reads an output ring, reports ended sequences, streams tokens to a subscriber.

    python -m bench.decode.ring_reader FD SLOTS ENDED [SOCKET]

FD: the ring's memory. ENDED: a pipe for slot and generation, 16 bits each, of ended sequences. SOCKET:
takes length-prefixed `SubscribeResponse`s of all that a reading found, made by the streams of a worker's
front. Until stdin closes; then prints what it has read and sent as one JSON object.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import sys
import time

from baton.base.parent_death import die_with_parent
from baton.base.process_tuning import batch_wakeups
from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import Finish, Record
from baton.v1.types_pb2 import Attempt
from services.decode.output_streams import OutputStreams

ENDED = struct.Struct("<HH")
LENGTH = struct.Struct("<I")
_POLL_S = 0.0002
_SWEEP_S = 0.2
_ROUTER = bytes(16)


class Outlet:
    """Streams every token as messages to one subscriber."""

    def __init__(self, follower: socket.socket) -> None:
        self._follower = follower
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
            self._follower.sendall(LENGTH.pack(len(data)) + data)
            self.messages += 1
        if time.monotonic() > self._sweep_at:
            self._streams.sweep()
            self._sweep_at = time.monotonic() + _SWEEP_S


def main() -> None:
    die_with_parent()
    batch_wakeups()  # as a worker's front does
    fd, slots, ended = (int(argument) for argument in sys.argv[1:4])
    outlet = Outlet(socket.socket(fileno=int(sys.argv[4]))) if len(sys.argv) > 4 else None
    reader = SharedRings(slots).reader(SharedMemory.attach(fd))
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


if __name__ == "__main__":
    main()
