"""Requests to a target, one after another, and what is recorded of them."""

from __future__ import annotations

import asyncio

from loadgen.common.record import Outcome, Record
from loadgen.common.settings import RequestClass, TargetSettings
from loadgen.targets.open_target import open_target
from loadgen.targets.target import Answer, Failure, Prompt, Request, RunClock

# A machine that stands still for a short time is no failure.
LONG_TIMEOUT_S = 5.0


async def ask(
    url: str,
    prompt: Prompt | None = None,
    *,
    tokens: int = 5,
    timeouts_s: tuple[float, ...] = (LONG_TIMEOUT_S,),
    form: str = "ids",
) -> tuple[list[Record], list[Answer], list[Failure | None]]:
    """The same request once for each time limit, one after another, over one target."""
    settings = TargetSettings.model_validate({"url": url, "model": "m", "form": form})
    clock = RunClock()
    target = open_target(settings, clock)
    await target.connect()
    records, answers, failures = [], [], []
    for number, timeout_s in enumerate(timeouts_s):
        record = Record(number, 0, "default", clock(), 3, tokens, request_id=f"r{number}")
        answer = Answer()
        failure: Failure | None = None
        try:
            async with asyncio.timeout(timeout_s):
                await target.send(
                    target.prepare(Request(record.request_id, prompt or [1, 2, 3], tokens, RequestClass())),
                    record,
                    answer,
                )
        except Failure as error:
            failure = error
        except TimeoutError:
            failure = Failure(Outcome.TIMEOUT)
        records.append(record)
        answers.append(answer)
        failures.append(failure)
    await target.close()
    return records, answers, failures
