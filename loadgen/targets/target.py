"""The interface of a target: sends a request and fills its record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

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
    """A request: prompt, output length, class."""

    request_id: str
    prompt: Prompt
    output_tokens: int
    klass: RequestClass


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded request; `metadata` is sent beside it where the protocol supports that."""

    data: bytes
    metadata: tuple[tuple[str, str], ...] = ()


def headers_of(request: Request, settings: TargetSettings) -> tuple[tuple[str, str], ...]:
    """Metadata of a request, the same over both protocols: id, tenant, limits, user agent."""
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
    return (*headers, *credentials_of(settings))


def temperature_of(request: Request, settings: TargetSettings) -> float:
    """The sampling temperature of a request: its class's, or else the target's."""
    own = request.klass.temperature
    return settings.temperature if own is None else own


def credentials_of(settings: TargetSettings) -> tuple[tuple[str, str], ...]:
    """The metadata of an API key, if there is one."""
    key = os.environ.get(settings.api_key_env)
    return (("authorization", f"Bearer {key}"),) if key else ()


@dataclass(slots=True)
class Answer:
    """The answer, for the next turn of a conversation."""

    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Failure(Exception):  # noqa: N818  (it is an outcome of the server's, not an error of ours)
    """A failed request: an `Outcome` or a protocol's own code, and the server's message."""

    def __init__(self, outcome: str, detail: str = "") -> None:
        super().__init__(outcome, detail)
        self.outcome = outcome
        self.detail = detail[:200]


class RunClock:
    """Seconds since the start of the run, by the machine's monotonic clock, which all processes share. Tests
    use their own clock."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.start = 0.0

    def __call__(self) -> float:
        return self._monotonic() - self.start


class Target(Protocol):
    """One server over one protocol. `send` is called in one task per request."""

    async def connect(self) -> None:
        """Connects. Raises LoadgenError where the server does not answer."""

    def prepare(self, request: Request) -> Payload:
        """Encodes a request before its time."""

    async def send(self, payload: Payload, record: Record, answer: Answer) -> None:
        """Sends a request and reads its response to the end, filling the record.

        Raises Failure, and nothing else but its own cancellation, which cancels the request at the server.
        Requests are never retried.
        """

    async def close(self) -> None:
        """Closes every connection to the target."""
