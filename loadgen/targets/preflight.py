"""Checks before the clock starts: whether the server answers, which model it serves, which extensions it
accepts, what words cost there, and how fast it is when idle.

Text prompts need words of known cost. Only words with the same number of letters are used: in most
vocabularies each is one token, and where bytes are tokens each has the same number. The cost is the server's
own usage: one request per text, with one output token.

Then the warm-up, as wide as the load: fewer requests than a full batch would leave the server's graphs and
caches cold.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio

from baton.v1.router_pb2 import ListModelsRequest
from baton.v1.router_pb2_grpc import RouterServiceStub
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Record
from loadgen.common.settings import Settings, TargetSettings, Words
from loadgen.load.alphabet import LEXICON
from loadgen.load.arrivals import Stage
from loadgen.load.sources import recorded_times, workload_of
from loadgen.load.workload import Workload
from loadgen.targets.grpc_target import CONNECT_S, OPTIONS, wait_ready
from loadgen.targets.http_connection import get
from loadgen.targets.open_target import open_target
from loadgen.targets.target import (
    Answer,
    Failure,
    Message,
    Prompt,
    Request,
    RunClock,
    Target,
    credentials_of,
)
from loadgen.targets.tls import grpc_channel, is_grpc

T = TypeVar("T")

# Conversation numbers that no run reaches, so that a warm-up does not fill caches with a run's own prompts.
_FIRST_NUMBER = 2**40
# The most warm-up requests, unless more will be in flight.
_MOST_TO_SPARE = 256
_FEWEST_WARMUP = 4
# Letters of the words that text prompts consist of.
_LETTERS = 4
# Extensions to leave out, in this order, if the server refuses the request.
_EXTENSIONS = {"all": "no_ids", "no_ids": "none"}
_REFUSED = ("HTTP_400", "HTTP_422")


@dataclass(frozen=True, slots=True)
class Preflight:
    """The settings with what was learned, and the duration of a request on an idle server."""

    settings: Settings
    lone_s: float
    warmups: int


async def preflight(settings: Settings) -> Preflight:
    """Sends a request, then warms up. Raises LoadgenError where the server does not answer or no request
    succeeds."""
    if not settings.target.model:
        settings = _with_target(settings, model=await served_model(settings.target))
    if settings.target.form != "ids" and settings.prompts.file is None:
        settings, words = await _with_less(settings, learn_words)
        prompts = settings.prompts.model_copy(update={"words": words})
        settings = settings.model_copy(update={"prompts": prompts})
    settings, lone_s = await _with_less(settings, _alone)
    count = settings.generator.warmup
    if count is None:
        count = _concurrency(settings, lone_s)
    if count:
        await _send_at_once(settings, count)
    return Preflight(settings, lone_s, count)


async def _with_less(settings: Settings, ask: Callable[[Settings], Awaitable[T]]) -> tuple[Settings, T]:
    """The settings with which the server answers: with fewer extensions where it refused more."""
    while True:
        try:
            return settings, await ask(settings)
        except Failure as failure:
            less = _EXTENSIONS.get(settings.target.extensions)
            if failure.outcome not in _REFUSED or less is None:
                words = f": {failure.detail}" if failure.detail else ""
                message = f"{settings.target.url}: a first request failed: {failure.outcome}{words}"
                raise LoadgenError(message) from None
            settings = _with_target(settings, extensions=less)


def _with_target(settings: Settings, **update: object) -> Settings:
    return settings.model_copy(update={"target": settings.target.model_copy(update=update)})


async def _alone(settings: Settings) -> float:
    """The duration of a request on an idle server: that of the second, since the first may include one-time
    costs."""
    clock = RunClock()
    target = open_target(settings.target, clock)
    workload = workload_of(settings)
    began = 0.0
    try:
        await target.connect()
        for number in range(2):
            began = clock()
            failure = await _send(settings, target, workload, _FIRST_NUMBER + number)
            if failure is not None:
                raise failure
        return clock() - began
    finally:
        await target.close()


async def _send_at_once(settings: Settings, count: int) -> None:
    """Failures here do not fail the run."""
    target = open_target(settings.target, RunClock())
    workload = workload_of(settings)
    try:
        await asyncio.gather(
            *(_send(settings, target, workload, _FIRST_NUMBER + 2 + number) for number in range(count))
        )
    finally:
        await target.close()


async def _send(settings: Settings, target: Target, workload: Workload, number: int) -> Failure | None:
    conversation = workload.conversation(number)
    if conversation is None:
        raise LoadgenError("there are no prompts")
    turn = conversation.turns[0]
    prompt: Prompt = turn.content
    if settings.target.form == "chat" and isinstance(prompt, str):
        prompt = (Message("user", prompt),)
    record = Record(number, 0, conversation.klass.name, 0.0, turn.tokens, turn.output_tokens)
    record.request_id = f"warmup-{number - _FIRST_NUMBER}"
    request = Request(record.request_id, prompt, turn.output_tokens, conversation.klass)
    try:
        async with asyncio.timeout(settings.target.timeout_s):
            await target.send(target.prepare(request), record, Answer())
    except Failure as failure:
        return failure
    except TimeoutError:
        return Failure("TIMEOUT", f"no end within {settings.target.timeout_s:g} s")
    return None


def _concurrency(settings: Settings, lone_s: float) -> int:
    """The number of warm-up requests: twice the expected concurrency, and at least that."""
    load = settings.load
    expected = load.concurrency or math.ceil(_highest_rate(settings) * lone_s)
    return max(_FEWEST_WARMUP, expected, min(_MOST_TO_SPARE, 2 * expected))


def _highest_rate(settings: Settings) -> float:
    """The highest rate of the load in requests per second; of a trace, that of its busiest second."""
    load = settings.load
    if load.rate is not None:
        return load.rate
    if load.stages:
        return max(max(stage.first, stage.last) for stage in map(Stage.parse, load.stages))
    recorded = recorded_times(settings)
    assert recorded is not None, "a closed loop has no rate"
    return max(Counter(int(time) for time in recorded).values())


async def served_model(settings: TargetSettings) -> str:
    """The only one, or the first. Raises LoadgenError where the server lists none."""
    names = await (_over_grpc(settings) if is_grpc(settings.url) else _over_http(settings))
    if not names:
        raise LoadgenError(f"{settings.url} does not report which model it serves: --model names it")
    return names[0]


async def _over_grpc(settings: TargetSettings) -> list[str]:
    async with grpc_channel(settings, OPTIONS) as channel:
        await wait_ready([channel], settings.url)
        try:
            response = await RouterServiceStub(channel).ListModels(
                ListModelsRequest(), timeout=CONNECT_S, metadata=credentials_of(settings)
            )
        except grpc.aio.AioRpcError:
            return []
    return [model.id for model in response.models]


async def _over_http(settings: TargetSettings) -> list[str]:
    headers = "".join(f"{name}: {value}\r\n" for name, value in credentials_of(settings))
    url = settings.url.rstrip("/").removesuffix("/v1")
    try:
        body = await get(f"{url}/v1/models", CONNECT_S, headers, settings.tls)
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except Failure as failure:
        if failure.outcome == "CONNECT":
            raise LoadgenError(f"no answer from {settings.url} ({failure.detail})") from None
        return []
    except (ValueError, LookupError, TypeError):
        return []


async def learn_words(settings: Settings) -> Words:
    """The words, their cost in tokens, and the overhead of every prompt.

    Raises LoadgenError where the server reports no usage or the words' costs differ, and Failure where it
    refuses.
    """
    words = tuple(f" {word}" for word in LEXICON if len(word) == _LETTERS)
    half = len(words) // 2
    target = open_target(settings.target, RunClock())
    try:
        await target.connect()
        first = await _count(settings, target, words[:half])
        second = await _count(settings, target, words[half : 2 * half])
        both = await _count(settings, target, words[: 2 * half])
    finally:
        await target.close()
    cost, left = divmod(both - first, half)
    overhead = first - half * cost
    if first != second or left or cost < 1 or overhead < 0:
        raise LoadgenError("this server's words differ in tokens; send token ids (--form ids)")
    return Words(words=words, cost=cost, overhead=overhead)


async def _count(settings: Settings, target: Target, words: Sequence[str]) -> int:
    text = "".join(words)
    prompt: Prompt = (Message("user", text),) if settings.target.form == "chat" else text
    record = Record(0, 0, "", 0.0, None, 1, request_id="words")
    await target.send(target.prepare(Request("words", prompt, 1, settings.load.classes[0])), record, Answer())
    if record.usage_input is None:
        raise LoadgenError("this server does not report prompt tokens; send token ids (--form ids)")
    return record.usage_input
