"""The record of one request at the client: raw times and counts, from which all metrics follow, for every
protocol."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """The outcome of a request, besides gRPC's own codes (`UNAVAILABLE`) and HTTP's (`HTTP_503`)."""

    OK = "OK"
    # Cancelled by the client, as planned.
    CANCELLED = "CANCELLED"
    # Stopped with the run; not counted.
    STOPPED = "STOPPED"
    # Timed out.
    TIMEOUT = "TIMEOUT"
    # No connection, or a broken one.
    CONNECT = "CONNECT"
    RESET = "RESET"
    # The stream ended without a finish reason.
    NO_FINISH = "NO_FINISH"
    # The response violates its protocol.
    MALFORMED = "MALFORMED"
    # The stream contained an error.
    STREAM_ERROR = "STREAM_ERROR"
    # Never sent: too many requests were in flight.
    NOT_SENT = "NOT_SENT"


NOT_COUNTED = frozenset({Outcome.STOPPED.value})
NO_FAILURE = frozenset({Outcome.OK.value, Outcome.CANCELLED.value, Outcome.STOPPED.value})


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds since the run's start, of one monotonic clock for all processes."""

    conversation: int
    turn: int
    klass: str
    scheduled: float
    # Requested lengths; None where only the server knows.
    asked_input: int | None
    asked_output: int
    # Whether the output must have exactly that length.
    exact_output: bool = True
    request_id: str = ""
    sent: float | None = None
    # The arrival time of each token; those of one message share a time.
    token_times: list[float] = field(default_factory=list)
    # Delay in seconds between arrival at this machine and reading, of the first and the last token. None
    # where unknown, as over gRPC.
    first_late: float | None = None
    last_late: float | None = None
    messages: int = 0
    ended: float | None = None
    outcome: str = ""
    # The server's error message, shortened.
    detail: str = ""
    finish_reason: str = ""
    # The server's own token counts; None where it reports none.
    usage_input: int | None = None
    usage_output: int | None = None
    # Prompt tokens that the server had in a cache.
    usage_cached: int | None = None
    # The field of a message that may have had output before the first token that was counted.
    uncounted: str = ""
    # Reported by the server: seconds of each stage, and the workers.
    stages: dict[str, float] | None = None
    workers: str = ""
    process: int = 0

    def note_tokens(self, count: int, now: float, late: float | None = None) -> None:
        """Records the arrival of `count` (at least one) tokens."""
        if not self.token_times:
            self.first_late = late
        self.last_late = late
        self.token_times.extend([now] * count)

    def to_line(self) -> bytes:
        """The record as one line of JSON; times to the microsecond."""
        document = {name: getattr(self, name) for name in _NAMES}
        document["token_times"] = [round(time, 6) for time in self.token_times]
        for name in _TIMES:
            if document[name] is not None:
                document[name] = round(document[name], 6)
        return json.dumps(document, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """Parses one line. Raises ValueError or TypeError for an invalid one."""
        document: dict[str, Any] = json.loads(line)
        return cls(**document)


_NAMES = tuple(Record.__slots__)
_TIMES = ("scheduled", "sent", "ended", "first_late", "last_late")


@dataclass(frozen=True, slots=True)
class Measured:
    """All records of a run ordered by due time, and the state of its processes."""

    records: list[Record]
    # The run's second 0, on the wall clock and on the machine's monotonic clock.
    started_at: float
    started_monotonic: float
    processes: list[dict[str, Any]]
    stopped: bool
