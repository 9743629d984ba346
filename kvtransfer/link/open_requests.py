"""Senders that ask for a link: from the threads that hear them to the loop, which answers each once."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, Protocol, TypeVar

from baton.errors import BatonError, ErrorKind

A = TypeVar("A")


class _Call(Protocol):
    def refuse(self, error: BatonError) -> None: ...


C = TypeVar("C", bound=_Call)


class OpenCalls(Generic[C]):
    """Of one listener."""

    def __init__(self, bound: int, timeout_s: float, wake: Callable[[], None]) -> None:
        """So many may wait at once, each for so long."""
        self._calls: queue.Queue[C] = queue.Queue(bound)
        self._timeout = timeout_s
        self._wake = wake

    def ask(self, call: C, answer: Future[A]) -> A:
        """By a sender's thread: what the loop answers to this call. `BatonError`: what it refuses with,
        OVERLOADED, DEADLINE."""
        try:
            self._calls.put_nowait(call)
            self._wake()
            return answer.result(timeout=self._timeout)
        except queue.Full:
            raise BatonError(ErrorKind.OVERLOADED, "too many links are being opened") from None
        except FutureTimeoutError:
            raise BatonError(ErrorKind.DEADLINE, "the receiver did not answer in time") from None

    def next(self) -> C | None:
        """By the loop, which alone takes them: whoever has waited longest."""
        return None if self._calls.empty() else self._calls.get_nowait()

    def refuse_all(self, error: BatonError) -> None:
        while (call := self.next()) is not None:
            call.refuse(error)
