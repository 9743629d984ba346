"""Callers that a listener turned away: all are counted, few logged, since any stranger can cause them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

EVERY_S = 60.0


class Refusals:
    """Of one listener. Any thread may call it."""

    def __init__(self, transport: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._transport = transport
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self._unlogged = 0

    def add(self, reason: str) -> None:
        """Counts one; logs it unless one was logged within the last `EVERY_S`."""
        with self._lock:
            self.count += 1
            self._unlogged += 1
            now = self._clock()
            if now < self._logged_at + EVERY_S:
                return
            self._logged_at = now
            since, self._unlogged = self._unlogged, 0
        facts = {"transport": self._transport, "reason": reason, "since_last": since}
        _LOG.warning("link_caller_refused", extra=facts)
