"""A cache of what clients send, or what is made of it: bounded in bytes, since one entry may be as large as
thousands of others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Keeps the values that were used last, as many as take at most `most_bytes` together. Thread-safe."""

    def __init__(self, most_bytes: int, size: Callable[[Key, Value], int]) -> None:
        """`size`: bytes that an entry takes, at least about."""
        self._most_bytes = most_bytes
        self._size = size
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """Returns the value and marks it as the one used last; None if there is none."""
        with self._lock:
            if (entry := self._entries.get(key)) is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Key, value: Value) -> None:
        """Adds a value, or replaces the key's, and drops those that were used longest ago: the new one too,
        where it is larger than all that may be kept."""
        size = self._size(key, value)
        with self._lock:
            self.bytes += size - self._entries.pop(key, (None, 0))[1]
            self._entries[key] = value, size
            while self.bytes > self._most_bytes:
                self.bytes -= self._entries.popitem(last=False)[1][1]
