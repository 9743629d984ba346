"""Chooses the prompt tokens that the next prefill step computes. Torch-free.

A step is bounded in time (what its chunks are expected to take) and in rows. The shortest remaining prompt
comes first, so that a long one does not delay the others: it gets what they leave, and while short ones
arrive at most half of a step, since an arrival waits for the whole step that runs and for the whole step that
it is in. A prompt goes before shorter ones if its TTFT limit would be missed otherwise (`prompt_order`).
While no short prompt waits and none has come lately, steps are longer, since a long prompt takes less time in
fewer steps; short prompts whose limits leave time for such steps do not count. Where more waits than the step
holds, rows are left to the next one that would make products less efficient (`row_times`). While several
prompts wait a step is one graph, unless attention takes much of it: the host launches a longer one kernel by
kernel, and ships what the step before has computed only when it has done so. Where even the largest graph
takes longer to read the weights than for its arithmetic, as of a mixture of experts, steps have more rows
than a graph, and time for those whose arithmetic takes longer. Beside sequences that are
decoded only their TPOT limits allow longer steps; and where a decode step may be part of each, steps are as
long as makes one graph with it, since all that are decoded get a token from each. The oldest, once it has
waited longer than the age cap, is guaranteed an eighth of the steps' time, so that none starves: neither
those without limits, nor those whose limits are missed.

A sequence starts when the pools hold all blocks of its prompt. While one lacks blocks none behind it starts;
and once it has waited for the age cap none starts before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind
from baton.base.prefill_defaults import AGE_CAP_S, MARGIN, STEP_S
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockPool, OutOfBlocksError
from baton.engine.plan.chunk_sizes import BESIDE_SHARE, SLACK, StepFilling
from baton.engine.plan.prompt_order import Prompt, in_order
from baton.engine.plan.step_plan import Chunk, StepPlan
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.sequence import Sequence
from baton.perf_model.prefill_fit import PrefillFit
from baton.perf_model.row_times import RowTimes

# In every fourth step the oldest prompt has a right to half of it if the three steps before gave it
# nothing, so it takes at most eight times as long as alone. With a larger share, short prompts beside a very
# long one would wait longer, at loads that leave the long one more anyway.
AGED_SHARE, AGED_PASSES = 1 / 2, 3
# Seconds for which short prompts count as having come lately: more may come.
LATELY_S = 1.0
# A short prompt does not count as one that steps must be short for while its limit leaves it this many of the
# longest steps.
PATIENT_STEPS = 4
# How many TPOT limits a longer step may take beside sequences that are decoded: each
# waits for it once, and has its limit on average.
STEP_LIMITS = 2


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Bounds of prefill steps: `tokens` and `seconds` of one step; `age_cap_s`: how long a prompt may be
    passed over. `alignment`: chunks that are longer, and not their sequence's last, end at a multiple of it.
    `alone_seconds`: of a step while no short prompt waits, none has come lately and what is decoded beside
    allows it; at least `seconds` in any case."""

    tokens: int
    seconds: float = STEP_S
    age_cap_s: float = AGE_CAP_S
    alignment: int = 1
    alone_seconds: float = 0.0

    @property
    def longest_seconds(self) -> float:
        """The longest that any step may take."""
        return max(self.seconds, self.alone_seconds)


class PrefillScheduler:
    """Sequences that wait or run; the owner of their blocks until `remove`."""

    def __init__(
        self,
        pools: BlockPools,
        bounds: StepBounds,
        *,
        max_sequences: int,
        cost: PrefillFit | None = None,
        clock: Callable[[], float] = time.monotonic,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._pools = pools
        self._bounds = bounds
        self._max_sequences = max_sequences
        self.clock = clock
        self.cost = cost or PrefillFit()
        # Whether this worker decodes sequences too, whose steps wait for prefill steps.
        self.beside_decode = False
        # The tightest TPOT limit of those; infinite where none has one.
        self.tpot_limit_s = math.inf
        # Of the pass that runs the steps: what products take by their rows, and up to how many rows, with
        # those that join, a step is one graph; 0 where none is.
        self.row_times = RowTimes()
        self.graph_rows = 0
        # When each was added, in that order.
        self._sequences: dict[Sequence, float] = {}
        # Steps in a row that gave the oldest nothing, once it has been here longer than the age cap.
        self._passes = 0
        # When the last prompt came that needs no more than one step.
        self._short_came = -math.inf

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(self._sequences)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        return sum(sequence.length - sequence.computed for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Raises BatonError: CONFLICT where the prompt can never fit, OVERLOADED where the queue is full."""
        if sequence.blocks is None and not self._pools.fits_ever(sequence.length):
            raise BatonError(
                ErrorKind.CONFLICT, f"a prompt of {sequence.length} tokens exceeds this worker's KV cache"
            )
        if len(self._sequences) >= self._max_sequences:
            raise BatonError(ErrorKind.OVERLOADED, f"{self._max_sequences} prefills wait already")
        self._sequences[sequence] = self.clock()

    def allocate_blocks(self, now: float) -> None:
        """Gives blocks to the prompts that wait, and what the prefix cache has of them, in the order in which
        they are computed, while there are blocks."""
        if any(not self._has_started(one) for one in self._sequences):
            left_s, _, crowded = self._waiting(now)
            self._allocate(self._in_order(left_s, now, crowded=crowded), now)

    def plan(self, now: float, others: int = 0) -> tuple[Chunk, ...]:
        """The next step's chunks, of prompts that have blocks; changes nothing. `others`: rows that may be
        computed with them. The caller launches all, calls `launched`, and `computed` when they are."""
        left_s, patient, crowded = self._waiting(now)
        if not any(map(self._has_started, left_s)):
            return ()
        ordered = self._in_order(left_s, now, crowded=crowded)
        runnable = [sequence for sequence in ordered if self._has_started(sequence)]
        seconds = self._step_s(crowded=crowded)
        step = StepFilling(self.cost, seconds, self._bounds.tokens, self._bounds.alignment, crowded=crowded)
        aged = self._aged(runnable, now)
        if aged is not None and len(runnable) > 1 and self._passes >= AGED_PASSES:
            step.give(aged, AGED_SHARE)
        for sequence in runnable:
            step.give(sequence, patient=sequence in patient)
        if not step.attends_much:
            waiting = sum(sequence.length - sequence.reached for sequence in runnable)
            self._leave_rows(step, waiting, others, several=len(runnable) > 1)
        return tuple(Chunk(sequence, sequence.reached, count) for sequence, count in step.given.items())

    def predicted_s(self, plan: StepPlan) -> float:
        """Predicted seconds of a step with chunks, by all that has been measured so far."""
        return self.cost.seconds_of_step(plan.runs, mixed=plan.is_mixed) + plan.decode_s

    @property
    def waiting_rows(self) -> int:
        """Tokens of prompts that have blocks, of which no chunk was launched yet."""
        return sum(one.length - one.reached for one in self._sequences if self._is_runnable(one))

    @property
    def waits(self) -> bool:
        """True where some prompt has blocks, and tokens of which no chunk was launched yet."""
        return any(map(self._is_runnable, self._sequences))

    def launched(self, chunks: Iterable[Chunk], now: float) -> None:
        """Records that a plan's chunks were launched; the next plan starts behind them. The blocks that they
        write stay pinned until they are computed, even if their owner frees them."""
        chunks = tuple(chunks)
        # Those that still wait count as short ones until they are launched.
        left_s = {chunk.sequence: self._seconds_left(chunk.sequence) for chunk in chunks}
        self._short_came = self._last_short(left_s, self._patient(left_s, now))
        aged = self._aged([one for one in self._sequences if self._is_runnable(one)], now)
        passed = aged is not None and aged not in left_s
        self._passes = self._passes + 1 if passed else 0
        for chunk in chunks:
            chunk.sequence.begun = chunk.start + chunk.count
            for pool, block in self._written(chunk):
                pool.pin(block)

    def computed(self, chunk: Chunk) -> None:
        """Records that the chunk's tokens have KV; its sequence may have been removed meanwhile."""
        sequence = chunk.sequence
        if sequence.begun:
            for pool, block in self._written(chunk):
                pool.unpin(block)
        if sequence in self._sequences:
            sequence.computed = chunk.start + chunk.count
            if self._prefixes is not None:
                self._prefixes.computed(sequence)

    def _written(self, chunk: Chunk) -> Iterator[tuple[BlockPool, int]]:
        assert chunk.sequence.blocks is not None
        for pool, group, table in zip(
            self._pools.pools, self._pools.layout.groups, chunk.sequence.blocks, strict=True
        ):
            first = chunk.start // group.block_tokens
            for block in table[first : group.blocks_for(chunk.start + chunk.count)]:
                yield pool, block

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence and frees its blocks, borrowed ones excepted; idempotent."""
        if sequence not in self._sequences:
            return
        del self._sequences[sequence]
        if sequence.blocks is not None and not sequence.borrowed:
            self._pools.release(sequence.blocks)

    def _waiting(self, now: float) -> tuple[dict[Sequence, float], Set[Sequence], bool]:
        """Predicted seconds of what is left of each prompt that waits; those that are in no hurry; and
        whether short ones that are in a hurry wait or have come lately."""
        left_s = {
            sequence: self._seconds_left(sequence)
            for sequence in self._sequences
            if sequence.reached < sequence.length
        }
        patient = self._patient(left_s, now)
        return left_s, patient, now - self._last_short(left_s, patient) < LATELY_S

    def _in_order(self, left_s: Mapping[Sequence, float], now: float, *, crowded: bool) -> list[Sequence]:
        """Prompts in the order in which they are computed. Each is due a step earlier than its limit says,
        since its first token comes at the end of a step."""
        seconds = self._step_s(crowded=crowded)
        prompts = [
            Prompt(sequence, MARGIN * left_s[sequence], self._due_s(sequence, now) - seconds)
            for sequence in sorted(left_s, key=lambda sequence: sequence.length - sequence.reached)
        ]
        return in_order(prompts, seconds, BESIDE_SHARE if crowded else 1.0)

    def _last_short(self, left_s: Mapping[Sequence, float], patient: Set[Sequence]) -> float:
        """Returns when the last short prompt came that was in a hurry, these included. Which are short is
        known once steps were timed."""
        short_s, came = self._bounds.seconds * (1 + SLACK), self._short_came
        for sequence, seconds in left_s.items():
            is_new = sequence.reached <= sequence.cached
            if is_new and 0 < seconds <= short_s and sequence not in patient:
                came = max(came, self._sequences[sequence])
        return came

    def _patient(self, left_s: Mapping[Sequence, float], now: float) -> Set[Sequence]:
        """Returns those whose limits leave them time for several of the longest steps."""
        least_s, due_s = PATIENT_STEPS * self._bounds.longest_seconds, self._due_s
        return {one for one in left_s if least_s <= due_s(one, now) - left_s[one] < math.inf}

    def _step_s(self, *, crowded: bool) -> float:
        """Seconds that a step may take; more while no prompt is in a hurry."""
        bounds = self._bounds
        if not self.beside_decode:
            least = self.cost.seconds_of(self.cost.busy_rows) if self._is_read_long() else 0.0
            return max(least, bounds.seconds if crowded else bounds.longest_seconds)
        if crowded or math.isinf(self.tpot_limit_s):
            return bounds.seconds
        return max(bounds.seconds, min(bounds.alone_seconds, STEP_LIMITS * self.tpot_limit_s))

    def _is_read_long(self) -> bool:
        """Returns whether the weights' reading takes longer than the arithmetic of the largest graph."""
        return 0 < self.graph_rows < self.cost.busy_rows

    def _leave_rows(self, step: StepFilling, waiting: int, others: int, *, several: bool) -> None:
        """Leaves rows to the next step that this one is better without. `waiting`: rows of both; `several`:
        they are of several prompts."""
        is_graph = step.rows <= self.graph_rows
        if (waiting > step.rows or not is_graph) and self._tokens_in_each_step(others):
            step.cut(self.graph_rows - others)
        elif several and not others and self.graph_rows and not self._is_read_long():
            step.cut(self.graph_rows)
        if waiting > step.rows:
            step.cut(self.row_times.most_worth(step.rows, others))

    def _tokens_in_each_step(self, others: int) -> bool:
        """Returns whether the decode step of `others` rows may be part of one step after the other: they make
        one graph, which takes no longer than sequences that are decoded have time for."""
        rows = self.graph_rows - others
        return 0 < others < self.graph_rows and self.cost.seconds_of(rows) <= self.tpot_limit_s < math.inf

    def _due_s(self, sequence: Sequence, now: float) -> float:
        """Seconds until its first token is due; infinite without a limit."""
        return self._sequences[sequence] + sequence.first_token_in_s - now

    def _seconds_left(self, sequence: Sequence) -> float:
        """Predicted seconds of what is left of a prompt; 0 before any step was timed."""
        return self.cost.seconds_of(self.cost.of(sequence.reached, sequence.length - sequence.reached))

    def _allocate(self, ordered: list[Sequence], now: float) -> None:
        """Gives blocks to the sequences in their order, while there are any."""
        aged = self._aged(ordered, now)
        may_start = aged is None or self._has_blocks(aged)
        for sequence in ordered:
            if sequence.borrowed:  # to find it a prefix takes nothing from those that wait for blocks
                self._has_blocks(sequence)
            elif not self._has_started(sequence):
                may_start = may_start and self._has_blocks(sequence)

    def _aged(self, sequences: list[Sequence], now: float) -> Sequence | None:
        """The oldest, if it has waited longer than the cap."""
        oldest = min(sequences, key=self._sequences.__getitem__, default=None)
        if oldest is None or now - self._sequences[oldest] < self._bounds.age_cap_s:
            return None
        return oldest

    def _block_seconds(self) -> float:
        """Seconds to compute a block's tokens; infinite before any were measured."""
        tokens = self._pools.layout.groups[0].block_tokens
        return self.cost.seconds_of(tokens) or math.inf

    def _is_runnable(self, sequence: Sequence) -> bool:
        """Returns whether a chunk of it may be planned."""
        return sequence.reached < sequence.length and self._has_started(sequence)

    def _has_started(self, sequence: Sequence) -> bool:
        """Returns whether its blocks are there, and what is cached of it in them."""
        return sequence.blocks is not None and (self._prefixes is None or sequence.prefix_taken)

    def _has_blocks(self, sequence: Sequence) -> bool:
        if self._prefixes is not None:
            sequence.prefix_taken = sequence.prefix_taken or self._prefixes.take_prefix(
                sequence, self._block_seconds()
            )
            return sequence.prefix_taken
        if sequence.blocks is None:
            try:
                sequence.blocks = self._pools.allocate(sequence.length)
            except OutOfBlocksError:
                return False
        return True
