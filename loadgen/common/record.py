"""One request as the client saw it: raw times and counts, from which all metrics follow, in any dialect."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a request ended, beside gRPC's own codes (`UNAVAILABLE`) and HTTP's (`HTTP_503`)."""

    OK = "OK"
    # Cancelled by the client, as its plan said.
    CANCELLED = "CANCELLED"
    # The run was ended before the request was; it counts nowhere.
    STOPPED = "STOPPED"
    # It did not end within its time.
    TIMEOUT = "TIMEOUT"
    # No connection; or the connection broke under the request.
    CONNECT = "CONNECT"
    RESET = "RESET"
    # The stream ended without a finish reason.
    NO_FINISH = "NO_FINISH"
    # The stream is none, or not as its protocol wants it.
    MALFORMED = "MALFORMED"
    # The stream told an error.
    STREAM_ERROR = "STREAM_ERROR"
    # Never sent: the generator had as many requests in flight as it may.
    NOT_SENT = "NOT_SENT"


NOT_COUNTED = frozenset({Outcome.STOPPED.value})
NO_FAILURE = frozenset({Outcome.OK.value, Outcome.CANCELLED.value, Outcome.STOPPED.value})


@dataclass(slots=True)
class Record:
    """Times are in seconds since the run's start, of one monotonic clock for all processes."""

    conversation: int
    turn: int
    klass: str
    scheduled: float
    # What was asked for; None where only the server can know.
    asked_input: int | None
    asked_output: int
    # Whether the output must have exactly that length.
    exact_output: bool = True
    request_id: str = ""
    sent: float | None = None
    # When each token arrived; those of one message share a time.
    token_times: list[float] = field(default_factory=list)
    # How late the first and the last of them were read: seconds since they had come to this machine. None
    # where that is not known, as over gRPC.
    first_late: float | None = None
    last_late: float | None = None
    messages: int = 0
    ended: float | None = None
    outcome: str = ""
    # The server's words on a failure, cut short.
    detail: str = ""
    finish_reason: str = ""
    # What the server counted; None where it did not say.
    usage_input: int | None = None
    usage_output: int | None = None
    # The server's own: seconds of each stage, and who did the work.
    stages: dict[str, float] | None = None
    workers: str = ""
    process: int = 0

    def note_tokens(self, count: int, now: float, late: float | None = None) -> None:
        """`count` tokens, one or more, are here."""
        if not self.token_times:
            self.first_late = late
        self.last_late = late
        self.token_times.extend([now] * count)

    def to_line(self) -> bytes:
        """One line of JSON; times to the microsecond."""
        document = {name: getattr(self, name) for name in _NAMES}
        document["token_times"] = [round(time, 6) for time in self.token_times]
        for name in _TIMES:
            if document[name] is not None:
                document[name] = round(document[name], 6)
        return json.dumps(document, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """The record of one line; ValueError or TypeError where it is none."""
        document: dict[str, Any] = json.loads(line)
        return cls(**document)


_NAMES = tuple(Record.__slots__)
_TIMES = ("scheduled", "sent", "ended", "first_late", "last_late")
