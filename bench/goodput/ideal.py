"""What the same arrivals would get from the measured step times and prefill rate, and no other cost.

Prompts are computed one after the other by the prefill worker that is free first; a decode worker gives each
of its sequences a token a step, by the curve of step times over batch and context; a sequence joins the
worker with the fewest at its next step. No handoff, no router, no batching of prompts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.common.record import Record
from loadgen.sizing.rates import Rates


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it is due, in seconds, and its tokens."""

    at: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Ideal:
    """Seconds to the first token, and per output token after it; 0 where there is only one."""

    ttft_s: float
    tpot_s: float


def arrivals_of(records: Sequence[Record]) -> list[Arrival]:
    """The arrivals of a run, in due order."""
    return [
        Arrival(record.scheduled, record.usage_input or record.asked_input or 1, record.asked_output)
        for record in sorted(records, key=lambda one: one.scheduled)
    ]


def simulate(arrivals: Sequence[Arrival], rates: Rates, prefill: int, decode: int) -> list[Ideal]:
    """What each arrival gets from so many prefill and decode workers, in the same order."""
    free_at = [0.0] * prefill
    first: list[float] = []
    for arrival in arrivals:
        begun = max(arrival.at, heapq.heappop(free_at))
        first.append(begun + rates.prefill_s(arrival.prompt))
        heapq.heappush(free_at, first[-1])
    ended = _decode(arrivals, first, rates, decode)
    return [
        Ideal(begun - arrival.at, (end - begun) / (arrival.output - 1) if arrival.output > 1 else 0.0)
        for arrival, begun, end in zip(arrivals, first, ended, strict=True)
    ]


@dataclass(slots=True)
class _Decoder:
    """A decode worker: the end of its last step, the tokens of its sequences, and those that each lacks."""

    now: float = 0.0
    context: int = 0
    left: dict[int, int] = field(default_factory=dict)


def _decode(arrivals: Sequence[Arrival], first: Sequence[float], rates: Rates, count: int) -> list[float]:
    """When each output ends."""
    ended = list(first)
    joins = sorted((at, number) for number, at in enumerate(first) if arrivals[number].output > 1)
    workers = [_Decoder() for _ in range(count)]
    lengths = [0] * len(arrivals)
    for at, number in [*joins, (math.inf, -1)]:
        for worker in workers:
            _advance(worker, at, rates, ended, lengths)
        if number < 0:
            break
        worker = min(workers, key=lambda one: len(one.left))
        if not worker.left:
            worker.now = max(worker.now, at)
        worker.left[number] = arrivals[number].output - 1
        lengths[number] = arrivals[number].prompt
        worker.context += lengths[number]
    return ended


def _advance(worker: _Decoder, until: float, rates: Rates, ended: list[float], lengths: list[int]) -> None:
    """Runs steps that begin before `until`."""
    left = worker.left
    while left and worker.now < until:
        batch = len(left)
        worker.now += rates.step_s(batch, worker.context / batch)
        worker.context += batch
        for number in list(left):
            left[number] -= 1
            lengths[number] += 1
            if not left[number]:
                del left[number]
                worker.context -= lengths[number]
                ended[number] = worker.now
