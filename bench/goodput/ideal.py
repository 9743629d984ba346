"""Simulates what the same arrivals would get by the step costs of a profile, at no other cost.

Prompts wait in one queue for the worker that has room for them first. A prefill worker computes one prompt
after the other; its sequences are decoded where the fewest are, and join there at the next step. A step gives
each sequence a token. A combined worker gives each step what its limit of the time per output token leaves
beside the decode step, to one prompt after the other (an eighth of the step at least, where there are no
prefill workers); while it decodes nothing, all of its time. No handoff, no router, no batching of prompts.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.perf_model.step_costs import StepCosts
from bench.goodput.arms import Arm
from bench.goodput.runs import Limits
from loadgen.common.record import Record
from loadgen.goodput.probe import Probe

# Of a step's time, for prompts, where its limit leaves less.
_LEAST_SHARE = 1 / 8
# What is left of a prompt by rounding.
_NOTHING_S = 1e-9


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


@dataclass(frozen=True, slots=True)
class Workers:
    """Numbers of workers: that prefill, that decode, and that do both. `tpot_s`: the limit by which these
    give prompts room."""

    prefill: int = 0
    decode: int = 0
    both: int = 0
    tpot_s: float = math.inf


def arrivals_of(records: Sequence[Record]) -> list[Arrival]:
    """The arrivals of a run, in due order."""
    return [
        Arrival(record.scheduled, record.usage_input or record.asked_input or 1, record.asked_output)
        for record in sorted(records, key=lambda one: one.scheduled)
    ]


def simulate(arrivals: Sequence[Arrival], costs: StepCosts, workers: Workers) -> list[Ideal]:
    """Serves all arrivals; returns what each gets, in the same order."""
    cluster = _Cluster(arrivals, costs, workers)
    cluster.run()
    return [
        Ideal(first - arrival.at, (ended - first) / (arrival.output - 1) if arrival.output > 1 else 0.0)
        for arrival, first, ended in zip(arrivals, cluster.first, cluster.ended, strict=True)
    ]


@dataclass(slots=True)
class _Decoding:
    """A worker that decodes: the tokens that each of its sequences lacks, those of all contexts, and, if it
    `computes` prompts, the one in progress with the seconds that it still takes."""

    computes: bool
    left: dict[int, int] = field(default_factory=dict)
    context: int = 0
    prompt: int = -1
    prompt_s: float = 0.0
    asleep: bool = True


class _Cluster:
    """Everything that happens to the arrivals, in order of time."""

    def __init__(self, arrivals: Sequence[Arrival], costs: StepCosts, workers: Workers) -> None:
        self._arrivals = arrivals
        self._costs = costs
        self._tpot_s = workers.tpot_s
        self._has_prefill = workers.prefill > 0
        self._idle_prefill = workers.prefill
        self._workers = [_Decoding(computes=True) for _ in range(workers.both)]
        self._workers += [_Decoding(computes=False) for _ in range(workers.decode)]
        self._waiting: deque[int] = deque()
        # (time, order, what): below 0 a worker's turn, another number the end of that prompt at a prefill
        # worker.
        self._events: list[tuple[float, int, int]] = []
        self._order = 0
        self._lengths = [arrival.prompt for arrival in arrivals]
        self.first = [0.0] * len(arrivals)
        self.ended = [0.0] * len(arrivals)

    def run(self) -> None:
        """Serves all arrivals."""
        due = deque(enumerate(self._arrivals))
        while due or self._events:
            if due and (not self._events or due[0][1].at <= self._events[0][0]):
                number, arrival = due.popleft()
                self._waiting.append(number)
                self._wake(arrival.at)
                continue
            now, _, what = heapq.heappop(self._events)
            if what < 0:
                self._turn(now, self._workers[-what - 1], what)
            else:
                self._idle_prefill += 1
                self._join(now, what, min(self._workers, key=lambda one: len(one.left)))
                self._wake(now)

    def _at(self, when: float, what: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what))

    def _wake(self, now: float) -> None:
        """Has idle prefill workers take prompts, and those that sleep and have work take a turn."""
        while self._idle_prefill and self._waiting:
            number = self._waiting.popleft()
            self._idle_prefill -= 1
            self._at(now + self._prompt_s(number), number)
        for place, worker in enumerate(self._workers):
            if worker.asleep and (worker.left or (worker.computes and self._waiting)):
                worker.asleep = False
                self._at(now, -place - 1)

    def _prompt_s(self, number: int) -> float:
        return self._costs.prompt_s(self._arrivals[number].prompt)

    def _turn(self, now: float, worker: _Decoding, place: int) -> None:
        """Runs one step: a token for each sequence, and a share of a prompt."""
        batch = len(worker.left)
        step_s = self._costs.token_s(batch, worker.context) if batch else 0.0
        part_s = self._part_of_prompt(worker, step_s) if worker.computes else 0.0
        if not batch and worker.prompt < 0:
            worker.asleep = True
            return
        now += step_s + part_s
        self._tokens(now, worker)
        if worker.prompt >= 0 and worker.prompt_s <= _NOTHING_S:
            number, worker.prompt = worker.prompt, -1
            self._join(now, number, worker)
        self._at(now, place)

    def _part_of_prompt(self, worker: _Decoding, step_s: float) -> float:
        """Seconds of this step that go to the prompt in progress, or to the next one that waits."""
        room_s, least_s = (self._tpot_s - step_s if step_s else math.inf), step_s * _LEAST_SHARE
        if worker.prompt < 0 and self._waiting and (room_s > least_s or not self._has_prefill):
            worker.prompt = self._waiting.popleft()
            worker.prompt_s = self._prompt_s(worker.prompt)
        if worker.prompt < 0:
            return 0.0
        part_s = min(worker.prompt_s, max(room_s, least_s))
        worker.prompt_s -= part_s
        return part_s

    def _tokens(self, now: float, worker: _Decoding) -> None:
        worker.context += len(worker.left)
        for number in list(worker.left):
            worker.left[number] -= 1
            self._lengths[number] += 1
            if not worker.left[number]:
                del worker.left[number]
                worker.context -= self._lengths[number]
                self.ended[number] = now

    def _join(self, now: float, number: int, worker: _Decoding) -> None:
        """Has the worker decode the output of a prompt that is computed."""
        arrival = self._arrivals[number]
        self.first[number] = self.ended[number] = now
        if arrival.output > 1:
            worker.left[number] = arrival.output - 1
            worker.context += arrival.prompt


def ideal_probe(records: Sequence[Record], rate: float, limits: Limits, costs: StepCosts, arm: Arm) -> Probe:
    """The probe of a run's arrivals at an arm of Baton's workers."""
    arrivals = arrivals_of(records)
    workers = Workers(arm.prefill, arm.decode, arm.both, limits.tpot_ms / 1e3)
    found = simulate(arrivals, costs, workers)
    scheduled = np.array([arrival.at for arrival in arrivals])
    spent = [
        one.ttft_s + one.tpot_s * (arrival.output - 1) for one, arrival in zip(found, arrivals, strict=True)
    ]
    good = [one.ttft_s * 1e3 <= limits.ttft_ms and one.tpot_s * 1e3 <= limits.tpot_ms for one in found]
    return Probe.of(rate, limits.goal, scheduled, scheduled + np.array(spent), np.array(good, np.bool_))
