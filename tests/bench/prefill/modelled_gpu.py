"""An H100 by arithmetic, for a prefill loop in virtual time: what a step of chunks of an 8B model takes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Run
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.device.streams.stream import TimedEvent
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.plan.prefill_step import PrefillStep
from baton.perf_model.prefill_fit import TimedPass
from baton.perf_model.row_times import RowTimes
from tests.support.events import FakeEvent

LAYERS, HEADS, KV_HEADS, DIM = 32, 32, 8, 128
# Tokens of context at which attention's arithmetic is as much as the products'.
HALF_CONTEXT = 26_600
# Multiprocessors; operations a second that attention's kernels reach, of the library on all of the chip, of
# the paged one on a multiprocessor that is full and on one that has a single program.
_PROCESSORS, _LIBRARY, _PAGED, _PAGED_ALONE = 132, 550e12, 2.7e12, 1.6e12
# Rows of the passes that are timed at start-up.
_FEW_ROWS, _MOST_ROWS = 64, 2048
# Weights are read once a step however few the rows; then rows count: products, norms and the like.
_LEAST_S, _ROW_S = 4.9e-3, 21.9e-6


@dataclass(frozen=True, slots=True)
class Gpu:
    """`splits`: whether the paged kernel gives one row's keys to several programs. `few_rows`: how many times
    longer that kernel takes a pair of a row and a key in chunks of less than 256 rows. `step_s`: what a step
    takes beside its rows; with 2.4 ms a prompt of 8,192 tokens in five steps takes 1.10 times as long as in
    one, as measured on the slower of two H100s."""

    splits: bool = True
    rows_an_item: int = 16
    few_rows: float = 1.0
    step_s: float = 1.1e-3

    def seconds(self, runs: Run[tuple[int, int]]) -> float:
        """Duration of a step of chunks (start, rows)."""
        rows = sum(count for _, count in runs)
        return self.step_s + max(_LEAST_S, rows * _ROW_S) + LAYERS * self._attention(runs)

    def _attention(self, runs: Run[tuple[int, int]]) -> float:
        library = paged = longest = 0.0
        for start, count in runs:
            pairs = count * (start + count / 2)
            if count >= 384 and (start == 0 or (start >= 4096 and start * count >= 1 << 23)):
                library += 4 * HEADS * DIM * pairs / _LIBRARY + start / 16384 * 53e-6
            else:
                paged += 4 * HEADS * DIM * pairs * (self.few_rows if count < 256 else 1.0)
                rows = min(count, self.rows_an_item)
                longest = max(longest, 4 * HEADS / KV_HEADS * DIM * rows * (start + count))
        alone = 0.0 if self.splits else longest / _PAGED_ALONE
        return library + max(paged / _PROCESSORS / _PAGED, alone)


@dataclass
class VirtualTime:
    """A clock that passes when it is waited on."""

    at: float = 0.0

    def now(self) -> float:
        return self.at

    def wait(self, seconds: float) -> None:
        self.at += max(seconds, 1e-5)


@dataclass
class _Event(FakeEvent):
    stream: ModelledStream
    at: float

    def query(self) -> bool:
        return self.stream.time.at >= self.at

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, _Event)
        return self.at - earlier.at


@dataclass
class ModelledStream:
    """The device: one step after the other."""

    time: VirtualTime
    asynchronous = True
    in_turn = False
    free_at: float = 0.0
    idle: float = 0.0

    def activate(self) -> contextlib.AbstractContextManager[None]:
        if self.free_at < self.time.at:
            self.idle += self.time.at - self.free_at
            self.free_at = self.time.at
        return contextlib.nullcontext()

    def record_event(self) -> _Event:
        return _Event(self, self.free_at)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass
class ModelledPass:
    """Takes the device as long as `gpu` says, and the host `host_s` to say it."""

    stream: ModelledStream
    gpu: Gpu = field(default_factory=Gpu)
    host_s: float = 4.5e-3
    alignment: int = 256
    refused: int = 0
    uncaptured: str = ""
    row_times: RowTimes = field(default_factory=RowTimes)
    graph_rows: int = 0

    @property
    def timed_passes(self) -> tuple[TimedPass, TimedPass]:
        """Passes with the seconds that a worker measures at start-up: a pass by itself, and one behind
        another."""
        few, most = (
            TimedPass(rows, max(self.gpu.seconds([(0, rows)]), self.host_s))
            for rows in (_FEW_ROWS, _MOST_ROWS)
        )
        return few, most

    def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        took = self.gpu.seconds(step.runs)
        # The device begins with what is launched first, and ends no earlier than the host.
        self.stream.free_at = max(self.stream.free_at + took, self.stream.time.at + self.host_s)
        self.stream.time.at += self.host_s
        return torch.zeros(step.rows, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[0], 2)
