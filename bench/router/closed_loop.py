"""What a stream of requests does, whatever its protocol: one after another, with random pauses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.router.counts import Counts

PROMPT = 32


@dataclass(frozen=True, slots=True)
class Load:
    """`output_len`: tokens of each request. A stream waits up to `pause_s` before each."""

    output_len: int
    pause_s: float


class ClosedLoop:
    """One stream. `send(max_tokens)` begins a request; its owner calls `start`, `received` and `ended`. The
    first request has a random length, so that streams are not in step with each other."""

    def __init__(self, load: Load, counts: Counts, send: Callable[[int], None]) -> None:
        self._load = load
        self._counts = counts
        self._send = send
        self._wanted = 0
        self._sent_ns = 0
        self._received = 0
        self._first = True

    def start(self) -> None:
        """Begins, after a pause."""
        self._pause()

    def received(self, tokens: int) -> None:
        """A message with so many tokens."""
        if not self._received:
            self._counts.first_token((time.monotonic_ns() - self._sent_ns) / 1e6)
        self._received += tokens
        self._counts.tokens += tokens
        self._counts.messages += 1

    def ended(self) -> None:
        """The response has ended; the next request follows. One that lacks tokens counts as failed."""
        complete = self._received == self._wanted
        self._counts.requests += complete
        self._counts.failed += not complete
        self._pause(0.0 if complete else 0.1)

    def _pause(self, least_s: float = 0.0) -> None:
        pause_s = least_s + random.random() * self._load.pause_s
        asyncio.get_running_loop().call_later(pause_s, self._begin)

    def _begin(self) -> None:
        longest = self._load.output_len
        self._wanted = random.randint(2, longest) if self._first else longest
        self._first = False
        self._received = 0
        self._sent_ns = time.monotonic_ns()
        self._send(self._wanted)
