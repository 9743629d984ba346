"""Prefill steps on a device: launches them, and draws the first tokens of prompts that are complete.

    launch ─▶ under way ─▶ ended: the chunks' results ─▶ finalize: blocks and durations

On a CPU a step has ended when `launch` returns. On a GPU the next step is launched before the one that runs
has ended (`StepPlanner`); a step's results are used once its end event is complete.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from baton.device.streams.stream import ComputeStream, TimedEvent
from baton.device.streams.upload import put_values
from baton.engine.device_watchdog import DeviceWatchdog
from baton.engine.executor.step_handle import ChunkResult, PrefillHandle
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.parallel.rank_exchange import DeviceGroup
from baton.engine.plan.prefill_scheduler import PrefillScheduler
from baton.engine.plan.prefill_state import PrefillState
from baton.engine.plan.step_plan import Chunk, StepPlan, step_of
from baton.engine.prefill.first_token import draw_first, first_logprobs, prompt_logprobs
from baton.engine.prefill.prompt_pass import PromptPass
from baton.engine.step_times import StepTimes

# Assumed duration of a step before any was measured (mode `exact` on a GPU measures none at start-up).
_UNMEASURED_STEP_S = 5.0
# Least part of the time of a mixed step that counts as the prompts'.
_LEAST_PART = 0.1


class PrefillSteps:
    """Runs the chunks of plans, packed into one batch a step."""

    def __init__(
        self,
        prompt_pass: PromptPass,
        scheduler: PrefillScheduler,
        stream: ComputeStream,
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[float], None] | None = None,
        group: DeviceGroup | None = None,
    ) -> None:
        """`before_step` is called with the predicted seconds of a step before it is launched: one that the
        host computes itself blocks its caller. `group`: through which the devices of the pass exchange; None
        where they do not."""
        self._pass = prompt_pass
        self._group = group
        self._stream = stream
        self._clock = clock
        self.scheduler = scheduler
        scheduler.row_times, scheduler.graph_rows = prompt_pass.row_times, prompt_pass.graph_rows
        self.state = PrefillState(in_turn=stream.in_turn, one_graph=not prompt_pass.uncaptured)
        """The steps under way, for the planner."""
        self.prompts_run = 0
        self.tokens_run = 0
        self.steps_ended = 0
        # When the step that `ended` last returned was last seen to be running.
        self.ended_after_ns = 0
        self._looked_ns = 0
        # The same by `clock`, and when the step that was finalized last ended, as far as is known.
        self._running_at = self._last_end = 0.0
        self.times = StepTimes(clock)
        """Durations of the steps that have ended, on the device; without what decode steps would have taken
        that were part of them."""
        self.host_s = 0.0  # of the host, to launch them; on a CPU, to run them
        self._under_way: deque[PrefillHandle] = deque()
        self._watchdog = DeviceWatchdog(clock)
        if group is not None:
            self._watchdog = DeviceWatchdog(clock, deadline_s=group.deadline_s, check=group.check)
        self._launched_s = 0.0  # what the step launched last should take
        self._before_step = before_step
        self._unfinalized: list[PrefillHandle] = []

    @property
    def under_way(self) -> bool:
        """True where a step was launched whose results `ended` has not returned."""
        return bool(self._under_way)

    @property
    def expected_step_s(self) -> float:
        """Predicted duration of the step that runs, or of the last one that ran, in seconds; 0 before any was
        measured."""
        under_way = self.state.under_way
        return self.scheduler.predicted_s(under_way[0]) if under_way else self._launched_s

    def device_hung(self) -> bool:
        """Returns whether a step is under way and none ends (`DeviceWatchdog`); to be called once per
        iteration. Raises ExchangeTimeoutError where a device waited for another in vain."""
        expected_s = self.expected_step_s or _UNMEASURED_STEP_S
        return self._watchdog.look(
            pending=self.under_way, progress=self.steps_ended, expected_step_s=expected_s
        )

    @property
    def ends_in_s(self) -> float:
        """Seconds until all that is under way should have ended; negative where it is late."""
        return self.state.ends_at - self._clock()

    def ending(self, within_s: float) -> tuple[list[Chunk], TimedEvent] | None:
        """Returns the chunks of the step that ends next and the event of its end, if that is expected within
        `within_s` or is overdue; else None."""
        if not self._under_way:
            return None
        first, *others = self._under_way
        if not self.scheduler.cost.unit_s:  # nothing has been measured
            return None
        behind = sum(self.scheduler.predicted_s(step.plan) for step in others)
        chunks = list(first.plan.chunks)
        return (chunks, first.end) if self.ends_in_s - behind < within_s else None

    def launch(self, plan: StepPlan, joined: JoinedRows | None = None) -> PrefillHandle:
        """Launches a plan's chunks, and the rows that join them."""
        self._launched_s = plan.expected_s
        if self._before_step is not None:
            self._before_step(plan.expected_s)
        now, now_ns = self._clock(), time.monotonic_ns()
        with torch.inference_mode(), self._stream.activate():
            begun = self._stream.record_event()
            hidden = self._pass.forward(step_of(plan.chunks), joined)
            results = [ChunkResult(chunk, now_ns) for chunk in plan.chunks]
            tokens = self._draw(results, hidden)
            self._add_prompt_logprobs(results, hidden)
            whole = None
            if self._group is not None:  # of the last exchange, and so of all before
                whole = self._stream.copy_to_host(self._group.ranks[0].whole)
            end = self._stream.record_event()
        if self._stream.asynchronous:
            # Behind decode steps it begins later: when, is seen (`_see_begun`).
            waits = self.state.in_turn and self.scheduler.beside_decode and not self._under_way
            self.state.ends_at = math.inf if waits else max(now, self.state.ends_at) + plan.expected_s
        self.host_s += self._clock() - now
        handle = PrefillHandle(plan, results, tokens, begun, end, self.state.ends_at, whole)
        self._under_way.append(handle)
        self.state.under_way.append(plan)
        if len(self._under_way) == 1:  # else the one that runs was polled before
            self._see_running()
        return handle

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
        `finalize` must be called next, so that results can be sent before it. A step in which one of several
        devices waited for another in vain has no results, nor has any behind it."""
        results: list[ChunkResult] = []
        self._see_begun()
        ran_at, self.ended_after_ns = self._running_at, self._looked_ns
        self._see_running()
        while self._under_way and self._under_way[0].end.query():
            whole = self._under_way[0].whole
            if whole is not None and not int(whole):
                break
            step = self._under_way.popleft()
            self.state.under_way.popleft()
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
            took = max(took - step.plan.decode_s, _LEAST_PART * took)
            decode_s, mixed = step.plan.decode_s, step.plan.is_mixed
            self.scheduler.cost.took(step.plan.runs, took, mixed=mixed, decode_s=decode_s)
            for chunk in step.plan.chunks:
                if not chunk.sequence.canary:
                    self.tokens_run += chunk.count
                    self.prompts_run += chunk.is_last
                self.scheduler.computed(chunk)
            self.times.add(took, self.tokens_run)
        self._unfinalized.clear()
        # The steps that are left run since that end, however long they were expected to wait.
        self._expect_end(self._last_end)

    def _expect_end(self, after: float) -> None:
        """Predicts when all steps that are under way will have ended, of which the oldest runs from `after`
        on."""
        self.state.ends_at = after + sum(map(self.scheduler.predicted_s, self.state.under_way))

    def _see_running(self) -> None:
        """Records when the oldest step that is under way is about to be polled."""
        self._looked_ns, self._running_at = time.monotonic_ns(), self._clock()

    def _see_begun(self) -> None:
        """Predicts the end of a step that had to wait for decode steps, once it runs."""
        if math.isinf(self.state.ends_at) and self._under_way and self._under_way[0].begun.query():
            self._expect_end(self._clock())
            if len(self._under_way) == 1:
                self._under_way[0].ends_at = self.state.ends_at

    def _results(self, step: PrefillHandle) -> list[ChunkResult]:
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
