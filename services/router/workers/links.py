"""The links of one prefill worker over which this router's requests failed.

A failed link gets no request for a while. Then one request at a time is sent over it: where that fails too
the pause doubles, and where it succeeds the link has not failed any more. A router's processes tell one
another (`take_news`, `learned`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.v1.admin_pb2 import FailedLink
from baton.v1.types_pb2 import WorkerIdentity
from services.common.observability.logs import get_log

# The first pause after a failure, and the longest, in seconds.
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
# Most reports that are kept for other processes; a router that is one process has none to take them.
_MOST_NEWS = 64

_log = get_log("links")


class Receiver(Protocol):
    """A decode worker as the receiver of a link."""

    lost: bool
    identity: WorkerIdentity

    @property
    def name(self) -> str:
        """Name of the worker, as in logs and metrics."""


@dataclass
class _Failed:
    """`retry_at`: when the pause is over. `trying`: requests that are sent over the link after a pause."""

    reason: str
    failures: int = 0
    retry_at: float = 0.0
    trying: int = 0


class Links:
    """The failed links of one prefill worker, by decode worker."""

    def __init__(
        self, name: str, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name`: the prefill worker's. `on_change` is called when a link fails, may be tried again, or has
        not failed any more."""
        self._name = name
        self._on_change = on_change
        self._clock = clock
        self._failed: dict[Receiver, _Failed] = {}
        # What this process has met and not told others: a decode worker, and why the link failed; empty: it
        # works again.
        self._news: deque[tuple[Receiver, str]] = deque(maxlen=_MOST_NEWS)
        # How often it was decided otherwise whether a link has failed.
        self.changes = 0

    def usable(self, decode: Receiver) -> bool:
        """True if a request may be sent over the link to a decode worker now."""
        failed = self._failed.get(decode)
        return failed is None or (not failed.trying and self._clock() >= failed.retry_at)

    def has_failed(self, decode: Receiver) -> bool:
        """True if the link failed and no request has succeeded since, and its pause is not over."""
        failed = self._failed.get(decode)
        return failed is not None and self._clock() < failed.retry_at

    def try_again(self, decode: Receiver) -> bool:
        """Records that a request is sent over the link; returns True if that is a try after a failure, which
        `tried` ends."""
        failed = self._failed.get(decode)
        if failed is None:
            return False
        failed.trying += 1
        return True

    def tried(self, decode: Receiver) -> None:
        """Records that a request that was a try has ended, in whatever way."""
        if (failed := self._failed.get(decode)) is not None and failed.trying:
            failed.trying -= 1
            self._on_change()

    def failed(self, decode: Receiver, reason: str) -> None:
        """Records that a handoff over the link failed. Those that were under way during the pause count as
        one failure."""
        if (pause_s := self._pause(decode, reason)) is not None:
            self._news.append((decode, reason or "unknown"))
            _log.warning(
                "link_failed", prefill=self._name, decode=decode.name, retry_s=pause_s, reason=reason
            )

    def worked(self, decode: Receiver) -> None:
        """Records that a handoff over the link succeeded."""
        if (failed := self._end_pause(decode)) is not None:
            self._news.append((decode, ""))
            _log.info("link_works_again", prefill=self._name, decode=decode.name, failures=failed.failures)

    def learned(self, decode: Receiver, reason: str) -> None:
        """Takes a report that another process of this router met a failure; or, where `reason` is empty, a
        success."""
        if reason:
            self._pause(decode, reason)
        else:
            self._end_pause(decode)

    def take_news(self) -> list[tuple[Receiver, str]]:
        """Returns what this process has met since the last call, as `learned` takes it."""
        if not self._news:
            return []
        news = list(self._news)
        self._news.clear()
        return news

    def _pause(self, decode: Receiver, reason: str) -> float | None:
        """The seconds of the pause that a failure begins; None where one lasts already."""
        now = self._clock()
        self._forget_lost()
        failed = self._failed.setdefault(decode, _Failed(reason))
        failed.reason = reason
        if now < failed.retry_at:
            return None
        pause_s: float = min(MIN_PAUSE_S * 2**failed.failures, MAX_PAUSE_S)
        failed.failures += 1
        failed.retry_at = now + pause_s
        asyncio.get_running_loop().call_later(pause_s, self._changed)
        self._changed()
        return pause_s

    def _end_pause(self, decode: Receiver) -> _Failed | None:
        """Removes a failed link, which works again, and returns its record; None where it had not failed."""
        failed = self._failed.pop(decode, None)
        if failed is not None:
            self._changed()
        return failed

    def _forget_lost(self) -> None:
        self._failed = {decode: failed for decode, failed in self._failed.items() if not decode.lost}

    def _changed(self) -> None:
        self.changes += 1
        self._on_change()

    def status(self) -> list[FailedLink]:
        """The failed links to decode workers that are not lost."""
        self._forget_lost()
        now = self._clock()
        return [
            FailedLink(
                decode=decode.name,
                reason=failed.reason,
                failures=failed.failures,
                retry_in_s=max(0.0, failed.retry_at - now),
            )
            for decode, failed in self._failed.items()
        ]
