"""Loads of a prefill loop, and the time of each prompt's first token. Torch-free except for the loop's
tensors.

Short prompts in a closed or open loop (Poisson), alone or alongside a long one that is repeated. The clock is
the caller's, so that the same code runs on a device and in a simulation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from baton.engine.executor.executor import StepExecutor
from baton.engine.executor.step_handle import ChunkResult
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.perf_model.prefill_fit import PrefillFit
from bench.engine_driver import take

# How late the end of a step is seen at most, as in an engine.
_UNDER_WAY_S = 0.0002
# Deadline of the steps that are under way when a load is over.
_DEADLINE_S = 60.0


class Time(Protocol):
    """A clock that can be advanced."""

    def now(self) -> float:
        """Returns the time in seconds, of any origin."""

    def wait(self, seconds: float) -> None:
        """Waits for `seconds` of this clock."""


@dataclass(frozen=True, slots=True)
class Load:
    """`count` short prompts of `tokens` (at least, beside a long one): `rate` per second (Poisson), or in a
    closed loop of `users`. `long`: tokens of the prompts next to them, at least one of which is completed; 0:
    none. It ends after `seconds` in any case."""

    tokens: int
    count: int
    rate: float = 0.0
    users: int = 0
    long: int = 0
    seconds: float = 60.0
    seed: int = 0

    def arrivals(self) -> Iterator[float]:
        """Arrival times in seconds; in a closed loop only those of the initial prompts."""
        draw, at = random.Random(self.seed), 0.0
        if not self.rate:
            yield from [0.0] * self.users
            return
        coming = itertools.count() if self.long else range(self.count)  # as long as the long one runs
        for _ in coming:
            at += draw.expovariate(self.rate)
            yield at


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has ended: its chunks as (start, rows), and its predicted and measured seconds."""

    runs: tuple[tuple[int, int], ...]
    predicted: float
    measured: float

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.runs)

    @property
    def depth(self) -> int:
        """Tokens before its last chunk."""
        return max(start for start, _ in self.runs)


@dataclass(slots=True)
class Served:
    """Results of a load: seconds from arrival to first token, of short and of long prompts. `unserved` short
    ones were still waiting at the end, and count with their waiting time; `reached`: progress of the last
    long one in tokens; `host`: the host's seconds to launch each step."""

    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)
    unserved: int = 0
    reached: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class StepLog:
    """Wraps a loop's pass and cost model, and records each step's chunks, predicted and measured time."""

    def __init__(self, cost: PrefillFit) -> None:
        self.steps: list[Step] = []
        self.host: list[float] = []
        self._cost = cost
        self._planned: list[tuple[tuple[tuple[int, int], ...], float]] = []

    def record_step(self, step: PrefillStep) -> None:
        """Records a step that begins now."""
        runs = tuple(step.runs)
        self._planned.append((runs, self._cost.seconds_of(self._cost.of_step(runs))))

    def took(self, seconds: float) -> None:
        """Records the end of the oldest running step."""
        self.steps.append(Step(*self._planned.pop(0), seconds))


class Traffic:
    """Submits prompts to a loop and takes the results, like an engine."""

    def __init__(
        self, executor: StepExecutor, log: StepLog, time: Time, token_ids: Callable[[int], tuple[int, ...]]
    ) -> None:
        """`token_ids(count)`: new random token ids."""
        self._executor, self._steps = executor, executor.prompts
        self._log = log
        self._time = time
        self._token_ids = token_ids
        self._came: dict[Sequence, float] = {}
        self._long: Sequence | None = None

    @property
    def cost(self) -> PrefillFit:
        """The cost model by which the loop's steps are planned."""
        return self._steps.scheduler.cost

    def wait(self, seconds: float) -> None:
        """Lets time pass while nothing runs."""
        self._time.wait(seconds)

    def run(self, load: Load) -> Served:
        """Runs until the load is served or its time is over; cancels the rest."""
        served, begun = Served(), self._time.now()
        arrivals = load.arrivals()
        coming = next(arrivals, None)
        first_step, first_host = len(self._log.steps), len(self._log.host)
        while len(served.short) < load.count or (load.long and not served.long):
            now = self._time.now()
            if now - begun > load.seconds:
                break
            if load.long and self._long is None:
                self._long = self._add(load.long, now)
            while coming is not None and begun + coming <= now:
                self._add(load.tokens, begun + coming)
                coming = next(arrivals, None)
            results = take(self._executor)
            did = self._executor.step_prompts() is not None
            results += take(self._executor)
            ended = self._note(results, served)
            if load.users:
                for _ in range(ended):
                    self._add(load.tokens, self._time.now())
            if not (did or results):
                left = _UNDER_WAY_S if coming is None else max(0.0, begun + coming - now)
                self._time.wait(min(left, _UNDER_WAY_S) if self._steps.under_way else left)
        served.seconds = self._time.now() - begun
        self._drop(served)
        served.steps = self._log.steps[first_step:]
        served.host = self._log.host[first_host:]
        return served

    def _add(self, tokens: int, came: float) -> Sequence:
        sequence = Sequence(self._token_ids(tokens), tokens, SamplingParams(), Limits(1))
        self._steps.scheduler.add(sequence)
        self._came[sequence] = came
        return sequence

    def _note(self, results: list[ChunkResult], served: Served) -> int:
        """The number of short prompts with a first token."""
        now, ended = self._time.now(), 0
        for result in results:
            served.tokens += result.chunk.count
            if result.token is None:
                continue
            sequence = result.chunk.sequence
            self._steps.scheduler.remove(sequence)
            took = now - self._came.pop(sequence)
            if sequence is self._long:
                self._long = None
                served.long.append(took)
            else:
                ended += 1
                served.short.append(took)
        return ended

    def _drop(self, served: Served) -> None:
        """Cancels the rest. Raises TimeoutError where a step does not end."""
        now = self._time.now()
        for sequence, came in self._came.items():
            self._steps.scheduler.remove(sequence)
            if sequence is self._long:
                served.reached = sequence.computed
            else:
                served.short.append(now - came)
                served.unserved += 1
        self._came.clear()
        self._long = None
        until = self._time.now() + _DEADLINE_S
        while self._steps.under_way:
            self._time.wait(_UNDER_WAY_S)
            take(self._executor)
            if self._time.now() > until:
                raise TimeoutError("a step does not end")
