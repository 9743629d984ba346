"""Short ways to settings and records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadgen.common.record import Outcome, Record
from loadgen.common.settings import (
    GeneratorSettings,
    JudgeSettings,
    LoadSettings,
    PromptSettings,
    Settings,
    TargetSettings,
)


def settings(
    *,
    url: str = "grpc://127.0.0.1:1",
    target: dict[str, Any] | None = None,
    prompts: dict[str, Any] | None = None,
    judge: dict[str, Any] | None = None,
    generator: dict[str, Any] | None = None,
    **load: Any,
) -> Settings:
    """A run's settings; what is not given is the default, with a rate of 10 and 100 requests."""
    if not {"concurrency", "stages", "trace", "rate"} & set(load):
        load["rate"] = 10.0
    if not {"num_requests", "duration_s", "stages", "trace"} & set(load):
        load["num_requests"] = 100
    return Settings(
        target=TargetSettings(url=url, model="m", **(target or {})),
        load=LoadSettings(**load),
        prompts=PromptSettings(**(prompts or {})),
        judge=JudgeSettings(**(judge or {})),
        generator=GeneratorSettings(**(generator or {})),
    )


def record(
    scheduled: float = 0.0,
    tokens: Sequence[float] = (0.1, 0.2),
    *,
    conversation: int = 0,
    sent: float | None = None,
    outcome: str = Outcome.OK,
    ended: float | None = None,
    **more: Any,
) -> Record:
    """A request that was due at `scheduled`; token times count from there."""
    times = [scheduled + token for token in tokens]
    end = ended if ended is not None else (times[-1] if times else scheduled)
    return Record(
        conversation=conversation,
        turn=0,
        klass=more.pop("klass", "default"),
        scheduled=scheduled,
        asked_input=more.pop("asked_input", 4),
        asked_output=more.pop("asked_output", len(times)),
        sent=scheduled if sent is None else sent,
        token_times=times,
        ended=end,
        outcome=outcome,
        **more,
    )
