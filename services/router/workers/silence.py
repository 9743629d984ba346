"""How long nothing has been heard from a worker, as seen by an event loop that may itself be delayed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A worker that is silent for longer is lost. One that stalls for a second is silent for 1.5 s at most: it
# sends and answers every half second. gRPC's pings break a dead connection after 2.25 s, so that a worker
# whose connection alone is dead has a moment to be heard over another.
SILENT_S = 2.5
# How often the silence of workers is looked at, in seconds.
LOOK_S = 0.1
# The most that the time between two looks counts. A process that was stopped, or whose loop was blocked, has
# heard nothing meanwhile for no fault of a worker; it first takes in what has come.
_LONGEST_LOOK_S = 2 * LOOK_S


class Silence:
    """Measures the silence of one source of messages. Its owner calls `look` every `LOOK_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._looked_at = clock()
        self._seconds = 0.0

    def heard(self) -> None:
        """Something came."""
        self._seconds = 0.0

    def look(self) -> bool:
        """Whether the source has been silent for longer than `SILENT_S`."""
        now = self._clock()
        self._seconds += min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        return self._seconds > SILENT_S
