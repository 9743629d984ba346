"""Demand on the workers, served or not, as scalers need to see it.

A worker's own figures end at its capacity: a router sends it no more than it can begin soon, and refuses what
would come too late. So a router counts every request when it asks for workers first, by the seconds that its
prompt takes on one worker, and which of these requests were not served; both over the last minute. What waits
is counted as it is now. Seconds are those of the worker that was given a prompt last; before there was one,
by the configured rate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator

from baton.base.errors import BatonError
from services.router.workers.worker import Worker

WINDOW_S = 60.0
# The reason of a request whose client, or whose deadline, ended it while it waited.
ABANDONED = "abandoned"
EXPECTED_TOKENS_PER_S = 10_000.0


class SlidingSum:
    """The sum of what was added in the last `WINDOW_S` seconds, in steps of a second."""

    def __init__(self) -> None:
        # Second and amount, the oldest first.
        self._added: deque[tuple[int, float]] = deque()

    def add(self, now: float, amount: float) -> None:
        """Adds an amount at a time in seconds, no earlier than the last one."""
        second = int(now)
        if self._added and self._added[-1][0] == second:
            amount += self._added.pop()[1]
        self._added.append((second, amount))

    def total(self, now: float) -> float:
        """The sum at a time."""
        while self._added and self._added[0][0] <= now - WINDOW_S:
            self._added.popleft()
        return sum(amount for _, amount in self._added)


class Asked:
    """A request that asks for workers for the first time. `tokens`: of its prompt; `seconds`: that it takes
    on one worker, as far as is known."""

    def __init__(self, tokens: int, seconds: float) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self.prefill: Worker | None = None
        self.cached = 0

    def placed(self, prefill: Worker, cached: int = 0) -> None:
        """Records the worker that computes the prompt, and how many of its tokens it has cached."""
        self.prefill, self.cached = prefill, cached


class Demand:
    """Demand of one queue's requests."""

    def __init__(self, expected_tokens_per_s: float = EXPECTED_TOKENS_PER_S) -> None:
        """`expected_tokens_per_s`: prompt tokens a second of a worker, until one was measured."""
        self._expected_tokens_per_s = expected_tokens_per_s
        self._measured: Worker | None = None
        self._requests, self._seconds = SlidingSum(), SlidingSum()
        # By the kind of the error with which it was refused.
        self._unserved: dict[str, tuple[SlidingSum, SlidingSum]] = {}
        self._waiting: set[Asked] = set()

    @contextlib.contextmanager
    def asked(self, tokens: int) -> Iterator[Asked]:
        """Counts a request with a prompt of `tokens` tokens: as waiting while the context is open, and as not
        served where it is left by an error. What `placed` says to be cached is taken off at the end."""
        one = Asked(tokens, self.seconds(tokens))
        now = asyncio.get_running_loop().time
        self._requests.add(now(), 1)
        self._seconds.add(now(), one.seconds)
        self._waiting.add(one)
        try:
            yield one
        except BatonError as error:
            self._count_unserved(now(), error.kind.name.lower(), one)
            raise
        except asyncio.CancelledError:
            self._count_unserved(now(), ABANDONED, one)
            raise
        finally:
            self._waiting.discard(one)
        if one.prefill is not None:
            self._measured = one.prefill
            self._seconds.add(now(), self.seconds(tokens, one.cached) - one.seconds)

    def seconds(self, tokens: int, cached: int = 0) -> float:
        """Seconds that a prompt takes on one worker."""
        if self._measured is None or not self._measured.costs.prefill_token_s:
            return max(0, tokens - cached) / self._expected_tokens_per_s
        return self._measured.costs.prompt_s(tokens, cached)

    def requests(self) -> float:
        """Requests that came in the last minute, those that were not served included."""
        return self._requests.total(asyncio.get_running_loop().time())

    def prefill_seconds(self) -> float:
        """The seconds of their prompts."""
        return max(0.0, self._seconds.total(asyncio.get_running_loop().time()))

    def unserved(self) -> dict[str, tuple[float, float]]:
        """Requests not served in the last minute, and the seconds of their prompts, by the reason."""
        now = asyncio.get_running_loop().time()
        return {reason: (n.total(now), s.total(now)) for reason, (n, s) in sorted(self._unserved.items())}

    def waiting(self) -> tuple[int, int, float]:
        """Requests that wait, their prompt tokens, and the seconds of their prompts."""
        waiting = self._waiting
        return len(waiting), sum(one.tokens for one in waiting), sum(one.seconds for one in waiting)

    def _count_unserved(self, now: float, reason: str, one: Asked) -> None:
        requests, seconds = self._unserved.setdefault(reason, (SlidingSum(), SlidingSum()))
        requests.add(now, 1)
        seconds.add(now, one.seconds)
