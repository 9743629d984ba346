"""What the generator knows of a server: it is sent a request, and a record says what became of it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.common.record import Record
    from loadgen.common.settings import RequestClass, TargetSettings


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


Prompt = list[int] | str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent; how long the answer is to be and whose it is goes with it."""

    request_id: str
    prompt: Prompt
    output_tokens: int
    klass: RequestClass


@dataclass(frozen=True, slots=True)
class Payload:
    """A request as it will travel; `metadata` goes beside it where the protocol has a place for that."""

    data: bytes
    metadata: tuple[tuple[str, str], ...] = ()


def headers_of(request: Request, settings: TargetSettings) -> tuple[tuple[str, str], ...]:
    """What is told beside a request, the same over both protocols: its id, tenant, limits, and who asks."""
    klass = request.klass
    headers = [("x-request-id", request.request_id)]
    if klass.tenant is not None:
        headers.append(("x-tenant-id", klass.tenant))
    if settings.slo_headers:
        headers += [
            (f"x-slo-{metric}-ms", f"{klass.goodput[metric]:g}")
            for metric in ("ttft", "tpot")
            if metric in klass.goodput
        ]
    if key := os.environ.get(settings.api_key_env):
        headers.append(("authorization", f"Bearer {key}"))
    return tuple(headers)


@dataclass(slots=True)
class Answer:
    """What the server said, for the next turn of a conversation."""

    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Failure(Exception):  # noqa: N818  (it is an outcome of the server's, not an error of ours)
    """The request failed: an `Outcome` or a protocol's own code, and the server's words."""

    def __init__(self, outcome: str, detail: str = "") -> None:
        super().__init__(outcome, detail)
        self.outcome = outcome
        self.detail = detail[:200]


class RunClock:
    """Seconds since the start of the run; the start is a time of the machine's monotonic clock, which is
    the same in all its processes. A test brings a clock of its own."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.start = 0.0

    def __call__(self) -> float:
        return self._monotonic() - self.start


class Target(Protocol):
    """One server over one protocol. `send` is called by one task a request."""

    async def connect(self) -> None:
        """LoadgenError where nobody answers."""

    def prepare(self, request: Request) -> Payload:
        """The request as it will travel: made before its time has come."""

    async def send(self, payload: Payload, record: Record, answer: Answer) -> None:
        """Sends it and follows the answer to its end, filling the record as tokens come.

        Raises Failure, and nothing else but its own cancellation, which ends the request at the server.
        A request is never sent again.
        """

    async def close(self) -> None:
        """Closes every connection."""
