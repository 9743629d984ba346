"""Sequences of plans, drawn by running the planner over random arrivals, and played again by hand.

A trace is what an engine was told: which prompts came, when they were given their blocks, each plan as
numbers, and which slots were freed. It is played on another engine without a planner's say, by plans that are
made of that engine's own prompts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from baton.engine.decode.slots import Grant
from baton.engine.executor.step_handle import StepHandle
from baton.engine.memory.blocks import BlockTables
from baton.engine.plan.decode_rows import mixed_batches_up_to
from baton.engine.plan.step_plan import Chunk, DecodeRows, StepPlan
from baton.engine.sequence import Limits, SamplingParams, Sequence
from bench.engine_driver import admit, take
from tests.engine.local_engine import RUN_S, LocalEngine

SLOTS, CHUNK, BLOCKS = 4, 16, 40
# Prompts by their number: their tokens, how many are drawn behind them (1: the prompt is computed and no
# slot used), and how.
_LENGTHS = (1, 3, 9, 16, 17, 33, 40)
_OUTPUTS = (1, 2, 3, 7)
_SAMPLINGS = (SamplingParams(), SamplingParams(0.9, seed=2**63 + 11), SamplingParams(0.9, 20, 0.95, seed=7))


@dataclass(frozen=True)
class Request:
    """A kind of prompt: the same again is the same text."""

    length: int
    max_tokens: int
    sampling: SamplingParams

    def sequence(self) -> Sequence:
        tokens = tuple((7 * self.length + 3 * place) % 90 + 3 for place in range(self.length))
        return Sequence(tokens, self.length, self.sampling, Limits(self.max_tokens))


@dataclass(frozen=True)
class Arrives:
    number: int
    request: Request


@dataclass(frozen=True)
class Leaves:
    """A prompt is cancelled while it is computed."""

    number: int


@dataclass(frozen=True)
class Observes:
    """Prompts are given their blocks."""

    now: float


@dataclass(frozen=True)
class Launches:
    """A plan; `chunks`: (number of the prompt, start, count)."""

    chunks: tuple[tuple[int, int, int], ...]
    decode: DecodeRows | None


@dataclass(frozen=True)
class Frees:
    """A sequence whose slot has ended, or a prompt that is computed and goes on elsewhere."""

    number: int


Event = Arrives | Leaves | Observes | Launches | Frees


@dataclass
class Outcome:
    """Results by the prompt's number: all tokens, slot and generation, blocks. A prompt that was cancelled
    has blocks alone."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    blocks: dict[int, BlockTables] = field(default_factory=dict)


class Player:
    """An engine and the prompts in it. What it is told and what comes of it are kept."""

    def __init__(
        self, folder: Path, device: str, *, graph: bool = False, mixed: Literal["", "graphs", "eager"] = ""
    ) -> None:
        self.engine = LocalEngine(
            folder / "model", slots=SLOTS, blocks=BLOCKS, chunk=CHUNK, device=device, graph=graph, mixed=mixed
        )
        self.now = 0.0  # virtual seconds
        self.outcome = Outcome()
        self.sequences: dict[int, Sequence] = {}
        self._numbers: dict[Sequence, int] = {}
        # Prefill steps that have not ended, of which results are still to be taken.
        self._under_way: list[StepHandle] = []

    def restart(self) -> None:
        """Forgets what has come of all prompts, none of which is left."""
        self.check_free()
        self.outcome = Outcome()
        self._numbers.clear()

    def arrives(self, number: int, request: Request) -> None:
        """A prompt that is decoded here takes its slot and all blocks now, as a ticket does."""
        sequence = self.sequences[number] = request.sequence()
        self._numbers[sequence] = number
        if request.max_tokens > 1:
            sequence.blocks = self.engine.pools.allocate(request.length + request.max_tokens - 1)
            sequence.borrowed = True
            key = self.outcome.slots[number] = self.engine.slots.grant()
            self.engine.output[key], self.engine.logprobs[key] = [], []
        self.engine.scheduler.add(sequence)

    def leaves(self, number: int) -> None:
        sequence = self.sequences.pop(number)
        self._note_blocks(number, sequence)
        self.engine.scheduler.remove(sequence)
        self._free(number, sequence)

    def observes(self, now: float) -> None:
        self.engine.scheduler.allocate_blocks(now)

    def launches(self, plan: StepPlan) -> None:
        """Launches a plan. Where entries were posted since, all before has ended: so they take effect in this
        step, on a device that runs behind its host, too."""
        engine, steps = self.engine, self.engine.decode.steps
        engine.decode.observe()
        if steps.posted > steps.applied:
            _until(self._observe_ended)
        handle = engine.executor.launch(plan)
        if plan.chunks:
            self._under_way.append(handle)

    def settle(self) -> list[int]:
        """Waits for the prefill steps that were launched, admits the prompts that are complete → those that
        are not decoded here."""
        _until(lambda: all(handle.ended() for handle in self._under_way))
        self._under_way.clear()
        complete = []
        for result in take(self.engine.executor):
            sequence = result.chunk.sequence
            if result.token is None:
                continue
            number = self._numbers[sequence]
            self.outcome.tokens[number] = [result.token]
            self._note_blocks(number, sequence)
            if sequence.limits.max_tokens == 1:
                complete.append(number)
            else:
                self.engine.scheduler.remove(sequence)
                self._admit(number, sequence, result.token)
        return complete

    def ended(self) -> list[int]:
        """The sequences whose slots have ended, as far as is known, and that hold their slots."""
        self.engine.read()
        return [
            n for n, key in self.outcome.slots.items() if n in self.sequences and key in self.engine.finish
        ]

    def frees(self, number: int) -> None:
        if number in self.outcome.slots:
            _until(lambda: self._observe_ended() and number in self.ended())
            self.outcome.tokens[number] = list(self.engine.output[self.outcome.slots[number]])
        sequence = self.sequences.pop(number)
        self.engine.scheduler.remove(sequence)
        self._free(number, sequence)

    def check_free(self) -> None:
        """Asserts that no slot, block or pin is held any more."""
        assert not self.sequences
        assert self.engine.slots.free == SLOTS
        assert (self.engine.pools.free, self.engine.pools.pinned) == (self.engine.pools.total, 0)

    def chunks(self, plan: StepPlan) -> tuple[tuple[int, int, int], ...]:
        return tuple((self._numbers[chunk.sequence], chunk.start, chunk.count) for chunk in plan.chunks)

    def _observe_ended(self) -> bool:
        self.engine.decode.observe()
        return self.engine.decode.steps.queued == 0

    def _note_blocks(self, number: int, sequence: Sequence) -> None:
        if sequence.blocks is not None:
            self.outcome.blocks[number] = sequence.blocks

    def _free(self, number: int, sequence: Sequence) -> None:
        if sequence.borrowed:
            assert sequence.blocks is not None
            self.engine.pools.release(sequence.blocks)
            self.engine.slots.release(*self.outcome.slots[number])

    def _admit(self, number: int, sequence: Sequence, token: int) -> None:
        assert sequence.blocks is not None
        capacity = sequence.length + sequence.limits.max_tokens - 1
        admit(
            self.engine.decode,
            Grant(*self.outcome.slots[number], sequence.blocks, capacity),
            token_ids=sequence.token_ids,
            prompt_length=sequence.length,
            last_token=token,
            end=sequence.end,
            sampling=sequence.sampling,
            limits=sequence.limits,
        )


def draw_trace(player: Player, seed: int) -> list[Event]:
    """Runs the planner over random arrivals in virtual time, until all has ended. Half of the seeds let
    decode steps share the launches of prompts."""
    draw, engine, planner = random.Random(seed), player.engine, player.engine.executor.planner
    engine.decode.steps.mixed_batches = tuple(mixed_batches_up_to(SLOTS)) if seed % 2 else ()
    engine.scheduler.clock = lambda: player.now
    trace: list[Event] = []
    coming, number, until = draw.randint(4, 9), 0, player.now + 100
    while number < coming or player.sequences:
        now = player.now = player.now + draw.random() * 0.01
        while number < coming and draw.random() < 0.3:
            request = Request(draw.choice(_LENGTHS), draw.choice(_OUTPUTS), draw.choice(_SAMPLINGS))
            if len(engine.scheduler.sequences) == SLOTS:
                break
            if request.max_tokens > 1 and not (engine.slots.free and engine.pools.free > 12):
                break
            trace.append(Arrives(number, request))
            player.arrives(number, request)
            number += 1
        computed = [n for n, one in player.sequences.items() if 0 < one.computed < one.length]
        if computed and draw.random() < 0.05:
            trace.append(Leaves(computed[0]))
            player.leaves(computed[0])
        engine.decode.observe()
        planner.look(now, engine.decode.ring.steps, decoding=engine.decode.steps.active > 0)
        planner.observe(now)
        trace.append(Observes(now))
        plan = planner.plan_decode() if draw.random() < 0.3 else planner.plan(now)
        if plan is not None:
            trace.append(Launches(player.chunks(plan), plan.decode))
            player.launches(plan)
        for ended in [*player.settle(), *player.ended()]:
            trace.append(Frees(ended))
            player.frees(ended)
        assert now < until, "the prompts do not end"
    return trace


def play(player: Player, trace: list[Event]) -> None:
    """Has another engine do the same, by plans of its own prompts."""
    for event in trace:
        match event:
            case Arrives(number, request):
                player.settle()
                player.arrives(number, request)
            case Leaves(number):
                player.settle()
                player.leaves(number)
            case Observes(now):
                player.observes(now)
            case Launches(chunks, decode):
                # What the chunks before have completed was admitted before this plan.
                player.settle()
                mine = (Chunk(player.sequences[number], start, count) for number, start, count in chunks)
                player.launches(StepPlan(tuple(mine), decode, "by hand"))
            case Frees(number):
                player.settle()
                player.frees(number)


def _until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + RUN_S
    while not done():
        assert time.monotonic() < until, "a step does not end"


@cache
def alone(folder: Path, device: str, request: Request) -> list[int]:
    """The tokens of a request by itself."""
    engine = LocalEngine(folder / "alone", slots=1, blocks=BLOCKS, chunk=CHUNK, device=device)
    sequence = request.sequence()
    if request.max_tokens > 1:
        key = engine.start(sequence.token_ids, max_tokens=request.max_tokens, sampling=request.sampling)
        return engine.run(key)[0]
    engine.scheduler.add(sequence)
    *_, last = engine.compute()
    assert last.token is not None
    return [last.token]
