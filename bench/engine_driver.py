"""Drives an engine's steps without a worker, for measurements and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.device.stream import ComputeStream
    from baton.engine.decode.slots import Grant
    from baton.engine.executor.decode_loop import DecodeLoop
    from baton.engine.executor.executor import StepExecutor
    from baton.engine.executor.prefill_steps import PrefillSteps
    from baton.engine.executor.step_handle import ChunkResult
    from baton.engine.plan.prefill_scheduler import PrefillScheduler
    from baton.engine.prefill.prompt_pass import PromptPass
    from baton.engine.sequence import Limits, SamplingParams
    from baton.engine.shared_memory.logprob_records import Logprobs

_POLL_S = 0.0002


def admit(
    loop: DecodeLoop,
    grant: Grant,
    *,
    token_ids: Sequence[int],
    prompt_length: int,
    last_token: int,
    last_logprobs: Logprobs | None = None,
    end: int,
    sampling: SamplingParams,
    limits: Limits,
    masked: bool = False,
) -> None:
    """Posts the admission of a sequence of which all is known; the arguments are those of `begin_admission`
    and `complete`."""
    entry = loop.begin_admission(
        grant, token_ids=token_ids, prompt_length=prompt_length, end=end, sampling=sampling, limits=limits,
        masked=masked,
    )  # fmt: skip
    loop.complete(
        entry, token_ids=token_ids, prompt_length=prompt_length, sampling=sampling, last_token=last_token,
        last_logprobs=last_logprobs,
    )  # fmt: skip
    loop.admit(entry)


def prompt_executor(
    prompt_pass: PromptPass,
    scheduler: PrefillScheduler,
    stream: ComputeStream,
    clock: Callable[[], float] = time.monotonic,
) -> StepExecutor:
    """Runs prefill steps alone."""
    from baton.engine.executor.prefill_steps import PrefillSteps

    return executor_of(PrefillSteps(prompt_pass, scheduler, stream, clock), clock)


def executor_of(steps: PrefillSteps, clock: Callable[[], float] = time.monotonic) -> StepExecutor:
    """Runs these prefill steps alone."""
    from baton.engine.executor.executor import StepExecutor
    from baton.engine.plan.step_planner import StepPlanner

    return StepExecutor(StepPlanner(steps.scheduler, steps.state, clock=clock), steps)


def decode_step(loop: DecodeLoop, between_layers: Callable[[], None] | None = None) -> bool:
    """Launches a decode step by itself; False where there was nothing to do or no room. `between_layers`: see
    `StepExecutor.launch`."""
    from baton.engine.plan.decode_rows import next_rows

    loop.observe()
    rows = next_rows(loop.steps)
    if rows is not None:
        loop.launch(rows, between_layers)
    return rows is not None


def take(executor: StepExecutor) -> list[ChunkResult]:
    """The results of all prefill steps that have ended since, with their accounting done."""
    results = executor.prompts.ended()
    executor.prompts.finalize()
    return results


def prefill_step(executor: StepExecutor) -> list[ChunkResult]:
    """Launches a prefill step where one is due, and takes what has ended; on a CPU, the same step."""
    executor.step_prompts()
    return take(executor)


def finish(executor: StepExecutor) -> list[ChunkResult]:
    """Runs prefill steps until there is nothing left to compute, and waits for all of them."""
    results = []
    while executor.step_prompts() is not None or executor.prompts.under_way:
        results += take(executor)
        if executor.prompts.under_way:
            time.sleep(_POLL_S)
    return results
