"""Prefill steps on a device whose time is the test's."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from baton.device.streams.stream import TimedEvent
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.executor.executor import StepExecutor
from baton.engine.executor.prefill_steps import PrefillSteps
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.memory.block_pools import BlockPools
from baton.engine.plan.decode_state import DecodeState
from baton.engine.plan.pacing import PrefillPacing
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.plan.step_planner import StepPlanner
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.engine.shared_memory.step_shape import StepShape
from baton.model_spec.layout import CacheGroup, Layout, Plane
from baton.perf_model.prefill_fit import PrefillFit
from baton.perf_model.row_times import RowTimes
from tests.support.events import FakeEvent

VOCAB = 11
BLOCK = 4
PACE = 0.001


@dataclass
class SlowEvent(FakeEvent):
    stream: SlowStream
    at: float

    def query(self) -> bool:
        return self.stream.now >= self.at

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, SlowEvent)
        assert self.query()
        return self.at - earlier.at


@dataclass
class SlowStream:
    """A device that takes PACE seconds a row, one step after the other; its time is the test's."""

    asynchronous = True
    in_turn = False
    now: float = 0.0
    free_at: float = 0.0
    rows: list[int] = field(default_factory=list)

    def activate(self) -> contextlib.AbstractContextManager[None]:
        self.free_at = max(self.free_at, self.now)
        return contextlib.nullcontext()

    def record_event(self) -> SlowEvent:
        return SlowEvent(self, self.free_at)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass
class NumberedPass:
    """The token behind a row at position p is p modulo the vocabulary."""

    stream: SlowStream
    alignment: int = 1
    refused: int = 0
    uncaptured: str = ""
    graph_rows: int = 0
    timed_passes: None = None
    row_times: RowTimes = field(default_factory=RowTimes)
    joined: list[JoinedRows | None] = field(default_factory=list)

    def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        self.joined.append(joined)
        positions = [p for chunk in step.chunks for p in range(chunk.start, chunk.start + chunk.count)]
        self.stream.rows.append(len(positions))
        self.stream.free_at += len(positions) * PACE
        return torch.tensor(positions)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0] % VOCAB, VOCAB).float()


class SlowDecode:
    """Decode steps of `rows` rows, which may join prefill steps; they take `step_s` seconds by themselves,
    and the device does not take them into account."""

    rows = 4
    followers: tuple[JoinedRows, ...] = ()

    def __init__(self) -> None:
        self.step_s = 0.02
        self.steps = DecodeState(StepShape(4), (4,), (4,), active=4, moves=True)

    def observe(self) -> None: ...

    def launch_mixed(self, rows: DecodeRows) -> SlowDecode:
        assert rows == DecodeRows(4)
        self.steps.launched += 1
        self.steps.mixed_at = self.steps.launched
        self.steps.ended = self.steps.launched
        return self

    def begin(self, workspace: object) -> None: ...

    def attend(self, attention: object, workspace: object) -> None: ...

    def end(self, workspace: object) -> None: ...


class Allowing(PrefillPacing):
    """Lets prefill steps begin at any time; `may_follow`: and right behind mixed ones."""

    may_follow = False

    def begun(self, now: float, expected_s: float, *, behind: bool = False) -> bool:
        return self.may_follow


class Ahead:
    """Prefill steps on a slow device; with `decode` beside decode steps."""

    def __init__(
        self, tokens: int, blocks: int = 200, *, measured: bool = True, decode: SlowDecode | None = None
    ) -> None:
        planes = (Plane("k", "float32", 1, 4), Plane("v", "float32", 1, 4))
        self.pools = BlockPools(Layout((CacheGroup((0,), planes, BLOCK),)), [blocks])
        cost = PrefillFit()
        if measured:
            cost.took([(0, 1)], PACE)
        bounds = StepBounds(tokens, seconds=1e6)
        self.scheduler = PrefillScheduler(self.pools, bounds, max_sequences=64, cost=cost)
        self.stream = SlowStream()
        self.passes = NumberedPass(self.stream)
        self.loop = PrefillSteps(self.passes, self.scheduler, self.stream, self.now)
        self.pacing = Allowing()
        planner = StepPlanner(
            self.scheduler,
            self.loop.state,
            DecodeState(StepShape(1), (1,)) if decode is None else decode.steps,
            self.pacing,
            lambda: 0.0 if decode is None else decode.step_s,
            self.now,
        )
        self.executor = StepExecutor(planner, self.loop, cast(DecodeLoop, decode))

    def now(self) -> float:
        return self.stream.now

    def begin(self) -> bool:
        """Launches the next step where one is due."""
        return self.executor.step_prompts() is not None

    @property
    def follows(self) -> bool:
        return self.executor.planner.follows

    def add(self, length: int) -> Sequence:
        sequence = Sequence(tuple(range(length)), length, SamplingParams(), Limits(4))
        self.scheduler.add(sequence)
        return sequence

    def check_blocks(self) -> None:
        held = [s.blocks for s in self.scheduler.sequences if s.blocks is not None]
        self.pools.check_integrity(held)
