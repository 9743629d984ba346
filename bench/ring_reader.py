"""A worker's front reduced to its reading: empties an output ring in a process of its own.

python -m bench.ring_reader FD SLOTS        until stdin closes; prints how many words it has read
"""

from __future__ import annotations

import select
import sys
import time

from baton.device.shared_memory import SharedMemory
from baton.engine.shared_rings import SharedRings

_POLL_S = 0.0002


def main() -> None:
    fd, slots = int(sys.argv[1]), int(sys.argv[2])
    reader = SharedRings(slots).reader(SharedMemory.attach(fd))
    words = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        read = len(reader.read())
        words += read
        if not read:
            time.sleep(_POLL_S)
    print(words, flush=True)


if __name__ == "__main__":
    main()
