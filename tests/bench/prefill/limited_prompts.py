"""Prompts with limits of the time to the first token, through the real loop and scheduler on a modelled GPU,
in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.engine.memory.block_pools import BlockPools
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.plan.step_plan import Chunk
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.model_spec.layout import CacheGroup, Layout, Plane
from baton.perf_model.prefill_fit import LEAST_ROWS_GPU, PrefillFit
from bench.engine_driver import prompt_executor, take
from tests.bench.prefill.modelled_gpu import HALF_CONTEXT, Gpu, ModelledPass, ModelledStream, VirtualTime

LAYOUT = Layout((CacheGroup((0,), (Plane("k", "float32", 1, 4),), block_tokens=64),))
BOUNDS = StepBounds(2048, 0.025, 2.0, 256, 0.06)
# How late the end of a step is seen at most.
_TURN_S = 0.0005


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt's arrival, its tokens, and its TTFT limit `limit_s` (infinite: none)."""

    at: float
    tokens: int
    limit_s: float = math.inf


def poisson(
    rate: float, seconds: float, tokens: int, limit_s: float = math.inf, seed: int = 0
) -> list[Arrival]:
    """Draws arrivals of a Poisson process with `rate` prompts of `tokens` tokens a second."""
    draw, at, found = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        found.append(Arrival(at, tokens, limit_s))
    return found


class InTurn(PrefillScheduler):
    """Round robin: each step has up to 1,024 tokens of the prompt whose turn was the longest ago."""

    _turns: dict[Sequence, int]

    def plan(self, now: float, others: int = 0) -> tuple[Chunk, ...]:
        turns = self.__dict__.setdefault("_turns", {})
        waiting = [one for one in self.sequences if one.blocks is not None and one.reached < one.length]
        if not waiting:
            return ()
        first = min(waiting, key=lambda one: turns.get(one, 0))
        return (Chunk(first, first.reached, min(1024, first.length - first.reached)),)

    def launched(self, chunks: Iterable[Chunk], now: float) -> None:
        (chunk,) = chunks
        self._turns[chunk.sequence] = max(self._turns.values(), default=0) + 1
        super().launched((chunk,), now)


Make = Callable[..., PrefillScheduler]


def serve(
    arrivals: Iterable[Arrival], make: Make = PrefillScheduler, gpu: Gpu | None = None
) -> dict[Arrival, float]:
    """The times to first token of all, served to the end."""
    time = VirtualTime()
    stream = ModelledStream(time)
    prompts = ModelledPass(stream, gpu or Gpu(step_s=2.4e-3), 1.4e-3)
    cost = PrefillFit(HALF_CONTEXT, LEAST_ROWS_GPU)
    cost.begin(*prompts.timed_passes)
    scheduler = make(BlockPools(LAYOUT, [50_000]), BOUNDS, max_sequences=10_000, cost=cost, clock=time.now)
    executor = prompt_executor(prompts, scheduler, stream, time.now)
    coming = sorted(arrivals, key=lambda one: one.at)
    came: dict[Sequence, Arrival] = {}
    found: dict[Arrival, float] = {}
    coming.reverse()
    while coming or came:
        while coming and coming[-1].at <= time.now():
            one = coming.pop()
            sequence = Sequence((0,) * one.tokens, one.tokens, SamplingParams(), Limits(1))
            sequence.first_token_in_s = one.at + one.limit_s - time.now()
            scheduler.add(sequence)
            came[sequence] = one
        results = take(executor)
        began = executor.step_prompts() is not None
        for result in [*results, *take(executor)]:
            if result.token is not None:
                scheduler.remove(result.chunk.sequence)
                one = came.pop(result.chunk.sequence)
                found[one] = time.now() - one.at
        if not (began or results):
            left = coming[-1].at - time.now() if coming else _TURN_S
            time.wait(min(left, _TURN_S) if executor.prompts.under_way else left)
    return found


def in_time(served: dict[Arrival, float], tokens: int) -> float:
    """The share of the prompts of `tokens` tokens that met their limits."""
    limited = [took <= one.limit_s for one, took in served.items() if one.tokens == tokens]
    return sum(limited) / len(limited)
