"""An incremental parser of server-sent events."""

from __future__ import annotations

from dataclasses import dataclass

# Longest event, so that memory is bounded.
LONGEST_EVENT = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its name (default `message`) and its data."""

    name: str
    data: bytes


class EventReader:
    """Splits a stream of bytes into events. Raises ValueError for an invalid stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete."""
        buffer = self._rest + data if self._rest else data
        if b"\r" in buffer:
            # A single \r at the end may be half of a \r\n.
            held = buffer.endswith(b"\r")
            buffer = buffer.replace(b"\r\n", b"\n")
            if not held:
                buffer = buffer.replace(b"\r", b"\n")
        *whole, self._rest = buffer.split(b"\n\n")
        if len(self._rest) > LONGEST_EVENT:
            raise ValueError("an event without an end")
        return [event for block in whole if (event := _event(block)) is not None]


def _event(block: bytes) -> Event | None:
    """The event; None for comments and keep-alives."""
    name, data = "message", []
    for line in block.split(b"\n"):
        field, colon, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
        elif line and colon != b":" and field not in (b"id", b"retry"):
            raise ValueError("a line that is no field of an event")
    return Event(name, b"\n".join(data)) if data else None
