"""Handles of steps that were launched."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.device.streams.stream import TimedEvent
from baton.engine.plan.decode_state import DecodeState
from baton.engine.plan.step_plan import Chunk, StepPlan
from baton.engine.shared_memory.logprob_records import Logprobs


@dataclass(frozen=True, slots=True)
class DecodeHandle:
    """A decode step by itself, the `number`-th of its loop. It is seen to end when the loop observes that."""

    plan: StepPlan
    state: DecodeState
    number: int

    def ended(self) -> bool:
        """Returns whether all of it has run."""
        return self.state.ended >= self.number


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
        """True where the chunk yields its sequence's first output token."""
        return self.chunk.is_last and self.chunk.sequence.draws


@dataclass(slots=True)
class PrefillHandle:
    """A step with chunks of prompts. `results`: of each chunk; `tokens` [results that draw one] int64 on the
    host; both are valid once it has ended. `ends_at`: when it was expected to, by the executor's clock;
    infinite where it waits for decode steps. `whole` [1] on the host, of several devices: then 0 where one of
    them has waited for another in vain, and nothing that the step computed may be used."""

    plan: StepPlan
    results: list[ChunkResult]
    tokens: Tensor
    begun: TimedEvent
    end: TimedEvent
    ends_at: float
    whole: Tensor | None = None

    def ended(self) -> bool:
        """Returns whether all of it has run."""
        return self.end.query()


StepHandle = DecodeHandle | PrefillHandle
"""A step that was launched. What it computed is taken from its owner once it has ended: `PrefillSteps`, and
the output ring."""
