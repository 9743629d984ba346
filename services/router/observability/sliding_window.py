"""Recent rates and latencies, from snapshots of the counts that are taken every second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.v1.router_pb2 import Latency, RouterStatus
from services.common.observability.histogram import SECONDS, quantile
from services.router.lifecycle.observations import Observations

LONGEST_S = 60
_TICK_S = 1.0


@dataclass(frozen=True)
class _Counts:
    at: float
    requests: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    # Bucket counts of ttft, tpot, itl and queue.
    histograms: dict[str, list[int]]


@dataclass(frozen=True)
class Recent:
    """Counts of one process over its last `seconds`. `histograms`: bucket counts by latency."""

    seconds: float
    requests: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    histograms: dict[str, list[int]]


class SlidingWindow:
    """Keeps the snapshots of the last minute."""

    def __init__(self, observations: Observations) -> None:
        self._observations = observations
        self._past: deque[_Counts] = deque([self._now()], maxlen=LONGEST_S + 1)

    async def run(self) -> None:
        """Takes a snapshot every second until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._past.append(self._now())

    def recent(self, window_s: float) -> Recent:
        """Returns the counts of the last `window_s` seconds, or since the start."""
        now = self._now()
        then = next((past for past in reversed(self._past) if now.at - past.at >= window_s), self._past[0])
        return Recent(
            seconds=max(now.at - then.at, 1e-3),
            requests=now.requests - then.requests,
            errors=now.errors - then.errors,
            prompt_tokens=now.prompt_tokens - then.prompt_tokens,
            completion_tokens=now.completion_tokens - then.completion_tokens,
            histograms={
                name: [a - b for a, b in zip(counts, then.histograms[name], strict=True)]
                for name, counts in now.histograms.items()
            },
        )

    def _now(self) -> _Counts:
        seen = self._observations
        return _Counts(
            at=time.monotonic(),
            requests=seen.outcomes.total(),
            errors=seen.errors,
            prompt_tokens=seen.prompt_tokens,
            completion_tokens=seen.completion_tokens,
            histograms={
                **{name: list(seen.latencies[name].counts) for name in ("ttft", "tpot", "itl")},
                "queue": list(seen.stages["queue"].counts),
            },
        )


def status_of(processes: Sequence[Recent]) -> RouterStatus:
    """Rates and latencies of all processes of a router together; sets no other fields."""

    def rate(read: Callable[[Recent], int]) -> float:
        return sum(read(one) / one.seconds for one in processes)

    def latency(name: str) -> Latency:
        return _latency(
            [sum(counts) for counts in zip(*(one.histograms[name] for one in processes), strict=True)]
        )

    return RouterStatus(
        window_s=max(one.seconds for one in processes),
        requests_per_s=rate(lambda one: one.requests),
        errors_per_s=rate(lambda one: one.errors),
        prompt_tokens_per_s=rate(lambda one: one.prompt_tokens),
        completion_tokens_per_s=rate(lambda one: one.completion_tokens),
        ttft=latency("ttft"),
        tpot=latency("tpot"),
        itl=latency("itl"),
        queue=latency("queue"),
    )


def _latency(counts: list[int]) -> Latency:
    return Latency(
        count=sum(counts),
        p50_ms=quantile(SECONDS, counts, 0.5) * 1e3,
        p99_ms=quantile(SECONDS, counts, 0.99) * 1e3,
    )
