"""The prefill loop: plans steps, launches them, and samples first tokens of prompts that are complete.

    begin ─▶ under way ─▶ ended: the chunks' results ─▶ finalize: blocks and durations

On a CPU a step has ended when `begin` returns. On a GPU the next step is launched before the one that runs
has ended, so that the GPU does not wait for the host; a step's results are used once its end event is
complete. Where steps run in turn with decode steps, and some sequence is decoded, the next is launched when
the one before has ended: the decode step that runs then is what the GPU does meanwhile. A decode step may
also be part of a prefill step (`DecodeSteps.join`). Then the next prefill step may run right behind it, where
the sequences that are decoded have time for that.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from baton.device.stream import ComputeStream, TimedEvent
from baton.device.upload import put_values
from baton.engine.device_watchdog import DeviceWatchdog
from baton.engine.plan.prefill_scheduler import Chunk, PrefillScheduler, step_of
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.prefill.first_token import draw_first, first_logprobs, prompt_logprobs
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.perf_model.prefill_fit import TimedPass
from baton.perf_model.row_times import RowTimes

if TYPE_CHECKING:
    # Its module brings Triton, which a CPU worker needs not.
    from baton.engine.forward.layer_program import JoinedRows

# Steps launched and not ended, on a GPU: one runs, one is queued.
_AHEAD = 2
# The next step is launched so long before the last should end, or for such a share of it where that is more:
# predictions have errors of some percent. Not earlier, since prompts that arrive meanwhile wait for both. A
# device starts on the first kernels while the rest are still being launched.
_LEAD_S, _LEAD_SHARE = 0.002, 0.1
# The loop may turn again as late as it last did; a longer turn than this counts as an exception.
_LONGEST_TURN_S = 0.01
# Assumed duration of a step before any was measured (mode `exact` on a GPU measures none at start-up).
_UNMEASURED_STEP_S = 5.0
# Of the time of a step with a decode step in it, the least part that counts as the prompts'.
_LEAST_PART = 0.1


class PromptPass(Protocol):
    """A model's forward pass over chunks of prompts; chunks that end at multiples of `alignment` cost least.

    `refused`: shapes of attention that the vendor's library does not support; `uncaptured`: why CUDA graphs
    could not be captured, or only those without rows that join, or empty; results are the same without, only
    slower. `graph_rows`: up to so many rows, with those that join, a pass is one graph; the host launches
    larger ones kernel by kernel, which may take it longer than the device. `timed_passes`: a pass of few rows
    and one of the most, timed at start-up; None where nothing was measured.
    """

    alignment: int
    refused: int
    uncaptured: str
    graph_rows: int

    @property
    def timed_passes(self) -> tuple[TimedPass, TimedPass] | None: ...

    @property
    def row_times(self) -> RowTimes:
        """Of a layer's products, measured at start-up."""

    def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        """Writes keys and values into the chunks' blocks → [N, hidden] after the final norm, rows packed in
        the chunks' order; valid until the next pass. Runs the rows that join, too."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] → [M, vocab] in the model's dtype."""


class DecodeSteps(Protocol):
    """Decode steps of the same worker, which may run as part of prefill steps."""

    @property
    def joined_last(self) -> bool:
        """See `DecodeLoop.joined_last`."""

    @property
    def rows_to_join(self) -> int:
        """See `DecodeLoop.rows_to_join`."""

    def join(self) -> JoinedRows | None:
        """See `DecodeLoop.join`."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of one by itself; 0 before any was measured."""


@dataclass(slots=True)
class ChunkResult:
    """A computed chunk, and the first output token where it was its sequence's last and a token is drawn.

    `logprobs`: the token's, where requested. `prompt_logprobs`: those of the prompt's tokens from
    chunk.start + 1 on, where requested.
    """

    chunk: Chunk
    # When its step was begun, in nanoseconds of the monotonic clock.
    begun_ns: int = 0
    token: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether the chunk yields its sequence's first output token."""
        return self.chunk.is_last and self.chunk.sequence.draws


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was launched. `tokens`: of the results that draw one, valid once the step has ended.
    `decode_s`: what the decode step that is part of it would take by itself, None without one. `ends_at`:
    when it was expected to end; infinite where it waits for decode steps."""

    results: list[ChunkResult]
    runs: list[tuple[int, int]]
    tokens: Tensor
    decode_s: float | None
    ends_at: float
    begun: TimedEvent
    end: TimedEvent

    @property
    def chunks(self) -> list[Chunk]:
        return [result.chunk for result in self.results]


class PrefillLoop:
    """Runs the chunks that the scheduler picks, packed into one batch a step."""

    def __init__(
        self,
        prompt_pass: PromptPass,
        scheduler: PrefillScheduler,
        stream: ComputeStream,
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[float], None] | None = None,
    ) -> None:
        """`before_step` is called with `expected_step_s` before a step is begun: one that the host computes
        itself blocks its caller."""
        self._pass = prompt_pass
        self._stream = stream
        self._clock = clock
        self.scheduler = scheduler
        scheduler.row_times, scheduler.graph_rows = prompt_pass.row_times, prompt_pass.graph_rows
        self.prompts_run = 0
        self.tokens_run = 0
        self.steps_ended = 0
        # When the step that `ended` last returned was last seen to be running.
        self.ended_after_ns = 0
        self._looked_ns = 0
        # The same by `clock`, and when the step that was finalized last ended, as far as is known.
        self._running_at = self._last_end = 0.0
        # Time of steps on the device; without what decode steps would have taken that were part of them.
        self.device_s = 0.0
        self.host_s = 0.0  # and of the host, to launch them; on a CPU, to run them
        self._under_way: deque[_Step] = deque()
        self._watchdog = DeviceWatchdog(clock)
        self._begun_s = 0.0  # what the step begun last should take
        self._before_step = before_step
        self._unfinalized: list[_Step] = []
        # Whose steps may be part of prefill steps; None: all run by themselves.
        self.decode: DecodeSteps | None = None
        # Whether sequences that are decoded have time for another such step right behind the last one.
        self.may_follow = False
        # When all that is under way should have ended, and when it was last asked for the next.
        self._ends_at = self._looked_at = 0.0

    @property
    def under_way(self) -> bool:
        """Whether a step was launched whose results `ended` has not returned."""
        return bool(self._under_way)

    @property
    def in_turn(self) -> bool:
        """Whether steps run in turn with this worker's decode steps."""
        return self._stream.in_turn

    @property
    def follows(self) -> bool:
        """Whether the next step is to run right behind the last one, in which a decode step is: with no
        other decode step between them."""
        if self.decode is None or not (self.may_follow and self._under_way):
            return False
        mixed = self._under_way[-1].decode_s is not None
        return mixed and self.decode.joined_last and self.scheduler.more_waits

    @property
    def expected_step_s(self) -> float:
        """Predicted duration of the step that runs, or of the last one that ran, in seconds; 0 before any was
        measured."""
        return self._predicted_s(self._under_way[0]) if self._under_way else self._begun_s

    @property
    def begun_step_s(self) -> float:
        """Predicted duration of the step that was begun last, in seconds; 0 before any was measured."""
        return self._begun_s

    def device_hung(self) -> bool:
        """Whether a step is under way and none ends (`DeviceWatchdog`); to be called once a turn, after
        `begin`."""
        expected_s = self.expected_step_s or _UNMEASURED_STEP_S
        return self._watchdog.look(
            pending=self.under_way, progress=self.steps_ended, expected_step_s=expected_s
        )

    @property
    def ends_in_s(self) -> float:
        """Seconds until all that is under way should have ended; negative where it is late."""
        return self._ends_at - self._clock()

    def ending(self, within_s: float) -> tuple[list[Chunk], TimedEvent] | None:
        """The chunks of the step that ends next and the event of its end, where that is expected within so
        many seconds or is overdue; else None."""
        if not self._under_way:
            return None
        first, *others = self._under_way
        if not self.scheduler.cost.unit_s:  # nothing has been measured
            return None
        behind = sum(map(self._predicted_s, others))
        return (first.chunks, first.end) if self.ends_in_s - behind < within_s else None

    def begin(self) -> bool:
        """Plans and launches the next step; False where there is nothing to compute or no step is due."""
        if not self._is_due():
            return False
        others = 0 if self.decode is None else self.decode.rows_to_join
        chunks = self.scheduler.plan(others)
        if not chunks:
            return False
        step = step_of(chunks)
        joined, decode_s = None, None
        if self.decode is not None and self._joins(step.rows, others):
            # Before the stream is activated: what it enqueues itself comes first.
            joined = self.decode.join()
            decode_s = None if joined is None else self.decode.step_s
        self._begun_s = self._step_s(step.runs, decode_s)
        if self._before_step is not None:
            self._before_step(self._begun_s)
        now, now_ns = self._clock(), time.monotonic_ns()
        with torch.inference_mode(), self._stream.activate():
            begun = self._stream.record_event()
            hidden = self._pass.forward(step, joined)
            results = [ChunkResult(chunk, now_ns) for chunk in chunks]
            tokens = self._draw(results, hidden)
            self._add_prompt_logprobs(results, hidden)
            end = self._stream.record_event()
        if self._stream.asynchronous:
            for chunk in chunks:
                self.scheduler.begun(chunk)
            # Behind decode steps it begins later: when, is seen (`_see_begun`).
            waits = self._waits_for_decode and not self._under_way
            self._ends_at = math.inf if waits else max(now, self._ends_at) + self._begun_s
        self._looked_at = self._clock()
        self.host_s += self._looked_at - now
        self._under_way.append(_Step(results, step.runs, tokens, decode_s, self._ends_at, begun, end))
        if len(self._under_way) == 1:  # else the one that runs was polled before
            self._see_running()
        return True

    def await_end(self, most_s: float) -> bool:
        """Busy-polls for up to `most_s` seconds until the oldest step has ended; returns whether it has."""
        until_ns = time.monotonic_ns() + int(most_s * 1e9)
        while self._under_way:
            looked_ns, looked_at = time.monotonic_ns(), self._clock()
            if self._under_way[0].end.query():
                break
            self._looked_ns, self._running_at = looked_ns, looked_at
            if looked_ns > until_ns:
                return False
        return True

    def ended(self) -> list[ChunkResult]:
        """The results of all steps that have ended since; of sequences that were removed there are none.
        `finalize` must be called next, so that results can be sent before it."""
        results: list[ChunkResult] = []
        self._see_begun()
        ran_at, self.ended_after_ns = self._running_at, self._looked_ns
        self._see_running()
        while self._under_way and self._under_way[0].end.query():
            step = self._under_way.popleft()
            # The host may see it late: launching the next step, kernel by kernel, takes it some ms.
            self._last_end = min(self._running_at, max(ran_at, step.ends_at))
            self.steps_ended += 1
            self._unfinalized.append(step)
            results += self._results(step)
        return results

    def finalize(self) -> None:
        """Accounts for the steps whose results were collected: unpins their blocks and records their
        durations."""
        if not self._unfinalized:
            return
        for step in self._unfinalized:
            took = step.end.seconds_since(step.begun)
            took = max(took - (step.decode_s or 0.0), _LEAST_PART * took)
            self.device_s += took
            self.scheduler.cost.took(step.runs, took, mixed=step.decode_s is not None)
            for chunk in step.chunks:
                if not chunk.sequence.canary:
                    self.tokens_run += chunk.count
                    self.prompts_run += chunk.is_last
                self.scheduler.computed(chunk)
        self._unfinalized.clear()
        # The steps that are left run since that end, however long they were expected to wait.
        self._ends_at = self._last_end + sum(map(self._predicted_s, self._under_way))

    def _joins(self, rows: int, others: int) -> bool:
        """Whether a decode step is to be part of a step of so many rows: products of both take no longer
        than apart, and both are one graph, unless the prompts by themselves are none either."""
        scheduler = self.scheduler
        one_graph = rows + others <= scheduler.graph_rows and not self._pass.uncaptured
        return (one_graph or rows > scheduler.graph_rows) and scheduler.row_times.joins(rows, others)

    def _predicted_s(self, step: _Step) -> float:
        return self._step_s(step.runs, step.decode_s)

    def _step_s(self, runs: list[tuple[int, int]], decode_s: float | None) -> float:
        """Predicted seconds of a step, with those of the decode step in it, if there is one."""
        cost = self.scheduler.cost
        return cost.seconds_of_step(runs, mixed=decode_s is not None) + (decode_s or 0.0)

    @property
    def _waits_for_decode(self) -> bool:
        return self.in_turn and self.scheduler.beside_decode

    def _see_running(self) -> None:
        """Records when the oldest step that is under way is about to be polled."""
        self._looked_ns, self._running_at = time.monotonic_ns(), self._clock()

    def _see_begun(self) -> None:
        """Predicts the end of a step that had to wait for decode steps, once it runs."""
        if math.isinf(self._ends_at) and self._under_way and self._under_way[0].begun.query():
            self._ends_at = self._clock() + sum(map(self._predicted_s, self._under_way))
            if len(self._under_way) == 1:
                self._under_way[0] = replace(self._under_way[0], ends_at=self._ends_at)

    def _is_due(self) -> bool:
        """Whether to launch a step: at once where none runs, else shortly before that one ends."""
        now = self._clock()
        turn, self._looked_at = min(now - self._looked_at, _LONGEST_TURN_S), now
        if not self._under_way:
            return True
        if self._waits_for_decode and not self.follows:
            return False
        lead_s = max(_LEAD_S, _LEAD_SHARE * self.expected_step_s)
        return len(self._under_way) < _AHEAD and now + turn >= self._ends_at - lead_s

    def _results(self, step: _Step) -> list[ChunkResult]:
        """The results of a step that has ended, except those of sequences that were removed."""
        drawing = (result for result in step.results if result.draws)
        for result, token in zip(drawing, step.tokens.tolist(), strict=True):
            result.token = token
        return [result for result in step.results if result.chunk.sequence in self.scheduler]

    def _draw(self, results: list[ChunkResult], hidden: Tensor) -> Tensor:
        """Draws the first token of every sequence whose last chunk this is, and adds its logprobs to the
        result. hidden [N, hidden]: the step's rows → tokens on the host, valid once the step has ended."""
        ends = accumulate(result.chunk.count for result in results)
        last_rows = {end - 1: result for end, result in zip(ends, results, strict=True) if result.draws}
        if not last_rows:
            return torch.empty(0, dtype=torch.int64)
        logits = self._pass.logits(hidden[put_values(list(last_rows), torch.int64, hidden.device)])
        sequences = [result.chunk.sequence for result in last_rows.values()]
        tokens = draw_first(logits, sequences)
        found = first_logprobs(logits, tokens, sequences)
        for result, logprobs in zip(last_rows.values(), found, strict=True):
            result.logprobs = logprobs
        return self._stream.copy_to_host(tokens)

    def _add_prompt_logprobs(self, results: list[ChunkResult], hidden: Tensor) -> None:
        """Adds the logprobs of the prompts' own tokens, where requested. Waits for the device."""
        row = 0
        for result in results:
            chunk, sequence = result.chunk, result.chunk.sequence
            if sequence.prompt_logprobs:
                rows = hidden[row : row + chunk.count]
                found = prompt_logprobs(rows, self._pass.logits, sequence, chunk.start)
                result.prompt_logprobs = tuple(found)
            row += chunk.count
