"""A prefill loop over a device whose time is the test's."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.device.stream import TimedEvent
from baton.engine.forward.layer_program import JoinedRows
from baton.engine.memory.block_pools import BlockPools
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.prefill.loop import PrefillLoop
from baton.engine.sequence import Limits, SamplingParams, Sequence
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


class Ahead:
    """A loop over a slow device."""

    def __init__(self, tokens: int, blocks: int = 200, *, measured: bool = True) -> None:
        planes = (Plane("k", "float32", 1, 4), Plane("v", "float32", 1, 4))
        self.pools = BlockPools(Layout((CacheGroup((0,), planes, BLOCK),)), [blocks])
        cost = PrefillFit()
        if measured:
            cost.took([(0, 1)], PACE)
        bounds = StepBounds(tokens, seconds=1e6)
        self.scheduler = PrefillScheduler(self.pools, bounds, max_sequences=64, cost=cost)
        self.stream = SlowStream()
        self.passes = NumberedPass(self.stream)
        self.loop = PrefillLoop(self.passes, self.scheduler, self.stream, lambda: self.stream.now)

    def add(self, length: int) -> Sequence:
        sequence = Sequence(tuple(range(length)), length, SamplingParams(), Limits(4))
        self.scheduler.add(sequence)
        return sequence

    def check_blocks(self) -> None:
        held = [s.blocks for s in self.scheduler.sequences if s.blocks is not None]
        self.pools.check_integrity(held)
