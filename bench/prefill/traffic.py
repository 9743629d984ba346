"""What comes to a prefill loop, and when each prompt's first token is there. Torch-free but for the loop's.

Short prompts in a closed loop or an open one (Poisson), alone or beside a long one that comes again as soon
as it is done. The time is the caller's, so that the same code runs on a device and in a simulation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from baton.engine.prefill.cost import PrefillCost
from baton.engine.prefill.loop import ChunkResult, PrefillLoop
from baton.engine.prefill.step import PrefillStep
from baton.engine.sequence import Limits, SamplingParams, Sequence
from bench.engine_driver import take

# How late the end of a step is seen at most, as in an engine.
_UNDER_WAY_S = 0.0002
# Of the steps that are under way when a load is over.
_DEADLINE_S = 60.0


class Time(Protocol):
    """A clock, and a way to let it pass."""

    def now(self) -> float:
        """Seconds."""

    def wait(self, seconds: float) -> None:
        """Returns that much later."""


@dataclass(frozen=True, slots=True)
class Load:
    """`count` short prompts of `tokens`, at least so many beside a long one: `rate` a second (Poisson), or in
    a closed loop of `users`. `long`: tokens of the prompt beside them, at least one of which is run to its
    end; 0: none. After `seconds` it is over, whatever is done."""

    tokens: int
    count: int
    rate: float = 0.0
    users: int = 0
    long: int = 0
    seconds: float = 60.0
    seed: int = 0

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start; of a closed loop those that are there at once."""
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
    """One that has ended: its chunks as (start, rows), and seconds as predicted when it was said and as
    measured."""

    runs: tuple[tuple[int, int], ...]
    predicted: float
    measured: float

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.runs)

    @property
    def depth(self) -> int:
        """Tokens before its deepest chunk."""
        return max(start for start, _ in self.runs)


@dataclass(slots=True)
class Served:
    """What a load saw: seconds from coming to first token, of short prompts and of long ones. Of the short
    ones `unserved` were still waiting at the end, and count with what they had waited; `reached`: tokens that
    the last long one had got to; `host`: seconds that each step took the host to say."""

    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)
    unserved: int = 0
    reached: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class StepLog:
    """Stands before a loop's pass and cost, and notes each step's chunks, predicted and measured time."""

    def __init__(self, cost: PrefillCost) -> None:
        self.steps: list[Step] = []
        self.host: list[float] = []
        self._cost = cost
        self._said: list[tuple[tuple[tuple[int, int], ...], float]] = []

    def said(self, step: PrefillStep) -> None:
        """A step is begun."""
        runs = tuple(step.runs)
        self._said.append((runs, self._cost.seconds_of(self._cost.of_step(runs))))

    def took(self, seconds: float) -> None:
        """The oldest of those begun has ended."""
        self.steps.append(Step(*self._said.pop(0), seconds))


class Traffic:
    """Gives prompts to a loop as an engine would, and takes what comes of them."""

    def __init__(
        self, loop: PrefillLoop, log: StepLog, time: Time, token_ids: Callable[[int], tuple[int, ...]]
    ) -> None:
        """`token_ids`: so many, never the same twice."""
        self._loop = loop
        self._log = log
        self._time = time
        self._token_ids = token_ids
        self._came: dict[Sequence, float] = {}
        self._long: Sequence | None = None

    def run(self, load: Load) -> Served:
        """Until all that the load wants is served, or its time is over; what is left is given up."""
        served, begun = Served(), self._time.now()
        arrivals = load.arrivals()
        coming = next(arrivals, None)
        first_step, first_said = len(self._log.steps), len(self._log.host)
        while len(served.short) < load.count or (load.long and not served.long):
            now = self._time.now()
            if now - begun > load.seconds:
                break
            if load.long and self._long is None:
                self._long = self._add(load.long, now)
            while coming is not None and begun + coming <= now:
                self._add(load.tokens, begun + coming)
                coming = next(arrivals, None)
            results = take(self._loop)
            did = self._loop.begin()
            results += take(self._loop)
            ended = self._note(results, served)
            if load.users:
                for _ in range(ended):
                    self._add(load.tokens, self._time.now())
            if not (did or results):
                left = _UNDER_WAY_S if coming is None else max(0.0, begun + coming - now)
                self._time.wait(min(left, _UNDER_WAY_S) if self._loop.under_way else left)
        served.seconds = self._time.now() - begun
        self._drop(served)
        served.steps = self._log.steps[first_step:]
        served.host = self._log.host[first_said:]
        return served

    def _add(self, tokens: int, came: float) -> Sequence:
        sequence = Sequence(self._token_ids(tokens), tokens, SamplingParams(), Limits(1))
        self._loop.scheduler.add(sequence)
        self._came[sequence] = came
        return sequence

    def _note(self, results: list[ChunkResult], served: Served) -> int:
        """How many short prompts have their first token."""
        now, ended = self._time.now(), 0
        for result in results:
            served.tokens += result.chunk.count
            if result.token is None:
                continue
            sequence = result.chunk.sequence
            self._loop.scheduler.remove(sequence)
            took = now - self._came.pop(sequence)
            if sequence is self._long:
                self._long = None
                served.long.append(took)
            else:
                ended += 1
                served.short.append(took)
        return ended

    def _drop(self, served: Served) -> None:
        """Gives up what is left. Raises TimeoutError where a step does not end."""
        now = self._time.now()
        for sequence, came in self._came.items():
            self._loop.scheduler.remove(sequence)
            if sequence is self._long:
                served.reached = sequence.computed
            else:
                served.short.append(now - came)
                served.unserved += 1
        self._came.clear()
        self._long = None
        until = self._time.now() + _DEADLINE_S
        while self._loop.under_way:
            self._time.wait(_UNDER_WAY_S)
            take(self._loop)
            if self._time.now() > until:
                raise TimeoutError("a step does not end")
