"""The outputs of ended sequences that are kept, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from services.common.engine.attempt_key import AttemptKey
from services.decode.output_stream import OutputStream


class EndedOutputs:
    """Ended outputs by attempt: those that their routers have been sent, and those that they have not."""

    def __init__(self) -> None:
        # Each in the order in which they came here.
        self._sent: dict[AttemptKey, OutputStream] = {}
        self._unsent: dict[AttemptKey, OutputStream] = {}
        # By attempt, as measured at the end.
        self._bytes: dict[AttemptKey, int] = {}
        self.total_bytes = 0

    def __iter__(self) -> Iterator[tuple[AttemptKey, OutputStream]]:
        """All, in the order in which they are given up where memory is short: those first that a router would
        need only if it lost what it was sent."""
        return chain(self._sent.items(), self._unsent.items())

    def put(self, key: AttemptKey, stream: OutputStream) -> None:
        """Adds an output that has just ended, or takes notice of how much of it has been sent."""
        here, there = (self._unsent, self._sent) if stream.has_unsent else (self._sent, self._unsent)
        there.pop(key, None)
        here[key] = stream
        if key not in self._bytes:
            size = self._bytes[key] = stream.memory_bytes
            self.total_bytes += size

    def remove(self, key: AttemptKey) -> None:
        """Forgets an output; does nothing if it is not here."""
        self._sent.pop(key, None)
        self._unsent.pop(key, None)
        self.total_bytes -= self._bytes.pop(key, 0)
