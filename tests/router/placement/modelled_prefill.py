"""The prompts of a modelled worker, in virtual time: the engine's own scheduler says what each step
computes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from baton.base.prefill_defaults import ALONE_STEP_S
from baton.engine.memory.block_pools import BlockPools
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.plan.step_plan import Chunk
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.model_spec.layout import CacheGroup, Layout, Plane
from baton.perf_model.prefill_fit import PrefillFit
from baton.perf_model.step_costs import StepCosts

_LAYOUT = Layout((CacheGroup((0,), (Plane("k", "float32", 1, 4),), block_tokens=64),))
# What a worker is configured with by default.
_BOUNDS = StepBounds(2048, alignment=256, alone_seconds=ALONE_STEP_S)


class ModelledPrompts:
    """Computes prompts step by step, each of which takes as long as `costs` say of its chunks times what
    `slower` returns as it begins."""

    def __init__(self, costs: StepCosts, slower: Callable[[], float], turn: asyncio.Lock | None) -> None:
        """`turn`: held while a step runs, in turn with decode steps; None: the worker decodes nothing."""
        self._costs, self._slower = costs, slower
        self._turn = contextlib.nullcontext() if turn is None else turn
        cost = PrefillFit(costs.prefill_half_context, int(costs.prefill_step_s / costs.prefill_token_s))
        self._scheduler = PrefillScheduler(
            BlockPools(_LAYOUT, [100_000]),
            _BOUNDS,
            max_sequences=10_000,
            cost=cost,
            clock=asyncio.get_running_loop().time,
        )
        self._scheduler.beside_decode = turn is not None
        cost.took([(0, 2048)], costs.prefill_s([(0, 2048)]))
        self._ended: dict[Sequence, asyncio.Event] = {}
        self._running: asyncio.Task[None] | None = None

    async def compute(self, tokens: int, left_s: float) -> None:
        """Returns when the prompt was computed, whose first token is due in `left_s`."""
        sequence = Sequence((0,) * tokens, tokens, SamplingParams(), Limits(1))
        sequence.first_token_in_s = left_s
        self._scheduler.add(sequence)
        self._ended[sequence] = ended = asyncio.Event()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        await ended.wait()

    async def _run(self) -> None:
        while chunks := self._launch():
            runs = [(chunk.start, chunk.count) for chunk in chunks]
            took = self._costs.prefill_s(runs) * self._slower()
            async with self._turn:
                await asyncio.sleep(took)
            self._scheduler.cost.took(runs, took)
            self._computed(chunks)

    def _launch(self) -> tuple[Chunk, ...]:
        now = asyncio.get_running_loop().time()
        self._scheduler.allocate_blocks(now)
        chunks = self._scheduler.plan(now)
        if chunks:
            self._scheduler.launched(chunks, now)
        return chunks

    def _computed(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._scheduler.computed(chunk)
            if chunk.is_last:
                self._scheduler.remove(chunk.sequence)
                self._ended.pop(chunk.sequence).set()
