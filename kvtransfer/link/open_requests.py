"""Senders that request a link from a listener: those that wait for an answer, and those turned away."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, TypeVar

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.link.interfaces import LinkRequest

_LOG = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0

A = TypeVar("A")
R = TypeVar("R", bound=LinkRequest)


class LinkRequestQueue(Generic[R]):
    """Queue of link requests from the threads that read them to the loop, which answers each exactly once."""

    def __init__(self, bound: int, timeout_s: float, wake: Callable[[], None]) -> None:
        """Creates a queue in which at most `bound` requests wait at once, each for at most `timeout_s`."""
        self._requests: queue.Queue[R] = queue.Queue(bound)
        self._timeout = timeout_s
        self._wake = wake

    def ask(self, request: R, answer: Future[A]) -> A:
        """Queues a request and blocks for its answer; called by the sender's thread. BatonError: the loop's
        refusal, OVERLOADED, DEADLINE."""
        try:
            self._requests.put_nowait(request)
            self._wake()
            return answer.result(timeout=self._timeout)
        except queue.Full:
            raise BatonError(ErrorKind.OVERLOADED, "too many links are being opened") from None
        except FutureTimeoutError:
            raise BatonError(ErrorKind.DEADLINE, "the receiver did not answer in time") from None

    def next(self) -> R | None:
        """The oldest request, or None; only the loop calls it."""
        return None if self._requests.empty() else self._requests.get_nowait()

    def refuse_all(self, error: BatonError) -> None:
        """Refuses every request that waits."""
        while (request := self.next()) is not None:
            request.refuse(error)


class RejectedCallers:
    """Counts callers that a listener turned away before they could request a link, and logs few of them,
    since anyone can cause them. Thread-safe."""

    def __init__(self, transport: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._transport = transport
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self._unlogged = 0

    def add(self, reason: str) -> None:
        """Counts one; logs it unless one was logged within the last `LOG_INTERVAL_S`."""
        with self._lock:
            self.count += 1
            self._unlogged += 1
            now = self._clock()
            if now < self._logged_at + LOG_INTERVAL_S:
                return
            self._logged_at = now
            since, self._unlogged = self._unlogged, 0
        facts = {"transport": self._transport, "reason": reason, "since_last": since}
        _LOG.warning("link_caller_rejected", extra=facts)
