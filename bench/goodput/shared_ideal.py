"""The ideal of arms whose workers decode and compute prompts on one GPU, without any other cost.

A combined worker gives each step what its limit of the time per output token leaves beside the decode step,
to one prompt after the other (an eighth of the step at least, where there are no prefill workers); while it
decodes nothing, all of its time.
Prompts wait in one queue for the worker that has room for them first, prefill workers included, whose prompts
are decoded where the fewest sequences are.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.goodput.ideal import Arrival, Ideal
from loadgen.sizing.rates import Rates

# Of a step's time, for prompts, where its limit leaves less.
_LEAST_SHARE = 1 / 8
# What is left of a prompt by rounding.
_NOTHING_S = 1e-9


@dataclass(slots=True)
class _Combined:
    """A combined worker: tokens of its sequences and those that each lacks, and the prompt in progress with
    the seconds that it still takes."""

    left: dict[int, int] = field(default_factory=dict)
    context: int = 0
    prompt: int = -1
    prompt_s: float = 0.0
    asleep: bool = True


@dataclass(slots=True)
class _Cluster:
    """Everything that happens to the arrivals, in order of time."""

    arrivals: Sequence[Arrival]
    rates: Rates
    tpot_s: float
    workers: list[_Combined]
    prefill: int
    idle_prefill: int
    waiting: deque[int] = field(default_factory=deque)
    # (time, order, what): a number below 0 is a worker's turn, another the end of that prompt at a prefill
    # worker.
    events: list[tuple[float, int, int]] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    _order: int = 0

    def at(self, when: float, what: int) -> None:
        self._order += 1
        heapq.heappush(self.events, (when, self._order, what))

    def run(self) -> None:
        """Serves all arrivals."""
        due = deque(enumerate(self.arrivals))
        while due or self.events:
            if due and (not self.events or due[0][1].at <= self.events[0][0]):
                number, arrival = due.popleft()
                self.waiting.append(number)
                self._wake(arrival.at)
                continue
            now, _, what = heapq.heappop(self.events)
            if what < 0:
                self._turn(now, self.workers[-what - 1], what)
            else:
                self.idle_prefill += 1
                worker = min(self.workers, key=lambda one: len(one.left))
                self._join(now, what, worker)
                self._wake(now)

    def _wake(self, now: float) -> None:
        """Prefill workers that are idle take prompts; combined ones that sleep have a turn."""
        while self.idle_prefill and self.waiting:
            number = self.waiting.popleft()
            self.idle_prefill -= 1
            self.at(now + self.rates.prefill_s(self.arrivals[number].prompt), number)
        for place, worker in enumerate(self.workers):
            if worker.asleep and (self.waiting or worker.left):
                worker.asleep = False
                self.at(now, -place - 1)

    def _turn(self, now: float, worker: _Combined, place: int) -> None:
        """One step: a token for each sequence, and a share of a prompt."""
        batch = len(worker.left)
        step_s = self.rates.step_s(batch, worker.context / batch) if batch else 0.0
        room_s, least_s = self.tpot_s - step_s if batch else math.inf, step_s * _LEAST_SHARE
        if worker.prompt < 0 and self.waiting and (room_s > least_s or not self.prefill):
            worker.prompt = self.waiting.popleft()
            worker.prompt_s = self.rates.prefill_s(self.arrivals[worker.prompt].prompt)
        if worker.prompt >= 0:
            room_s = max(room_s, least_s)
            part_s = min(worker.prompt_s, room_s)
            worker.prompt_s -= part_s
            step_s += part_s
        elif not batch:
            worker.asleep = True
            return
        now += step_s
        self._tokens(now, worker)
        if worker.prompt >= 0 and worker.prompt_s <= _NOTHING_S:
            number, worker.prompt = worker.prompt, -1
            self._join(now, number, worker)
        self.at(now, place)

    def _tokens(self, now: float, worker: _Combined) -> None:
        worker.context += len(worker.left)
        for number in list(worker.left):
            worker.left[number] -= 1
            self.lengths[number] += 1
            if not worker.left[number]:
                del worker.left[number]
                worker.context -= self.lengths[number]
                self.ended[number] = now

    def _join(self, now: float, number: int, worker: _Combined) -> None:
        """A prompt has been computed: the worker decodes the rest."""
        arrival = self.arrivals[number]
        self.first[number] = now
        if arrival.output <= 1:
            self.ended[number] = now
            return
        worker.left[number] = arrival.output - 1
        self.lengths[number] = arrival.prompt
        worker.context += arrival.prompt


def simulate_shared(
    arrivals: Sequence[Arrival], rates: Rates, prefill: int, both: int, tpot_s: float
) -> list[Ideal]:
    """What each arrival gets from so many prefill and combined workers, in the same order."""
    cluster = _Cluster(arrivals, rates, tpot_s, [_Combined() for _ in range(both)], prefill, prefill)
    cluster.run()
    return [
        Ideal(
            cluster.first[number] - arrival.at,
            (cluster.ended[number] - cluster.first[number]) / (arrival.output - 1)
            if arrival.output > 1
            else 0.0,
        )
        for number, arrival in enumerate(arrivals)
    ]
