"""Asks many requests of a cluster side by side, and judges every answer by the reference."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai

from baton.client import AsyncClient
from baton.engine.rings.logprob_records import Logprobs
from tests.e2e.cluster import Cluster
from tests.e2e.sampled_answers import Answer, Door, GrpcDoor, OpenAIDoor, Told
from tests.e2e.sampled_asks import Ask
from tests.support.reference import load_reference, raw_logits
from tests.support.sampler_truth import Output, logprob_error, wrong_tokens
from tests.support.text_truth import Ended, TextTruth


@dataclass(slots=True)
class Figures:
    """What a proof has seen."""

    choices: int = 0
    tokens: int = 0
    wrong: int = 0
    logprobs: int = 0
    prompt_logprobs: int = 0
    # In units of what is allowed, which is 1e-6 up to logprobs of 10.
    worst_logprob: float = 0.0
    finishes: dict[str, int] = field(default_factory=dict)


async def ask_both_doors(
    cluster: Cluster, texts: TextTruth, asks: Sequence[Ask], at_once: int
) -> list[Answer]:
    """Every request over gRPC and, every other one streamed, over HTTP; the doors must agree to the bit."""
    turn = asyncio.Semaphore(at_once)
    url = f"{cluster.url}/v1"
    async with (
        await AsyncClient.connect(cluster.grpc_address) as grpc,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=100) as http,
    ):
        streamed, whole = OpenAIDoor(http, texts, stream=True), OpenAIDoor(http, texts, stream=False)

        async def at(door: Door, ask: Ask) -> Answer:
            async with turn:
                return await door.ask(ask)

        over_grpc = [at(GrpcDoor(grpc), ask) for ask in asks]
        over_http = [at(whole if number % 2 else streamed, ask) for number, ask in enumerate(asks)]
        # In the order of asking, the two of one request are far from each other.
        answers = await asyncio.gather(*over_grpc, *over_http)
    for ask, mine, its in zip(asks, answers, answers[len(asks) :], strict=False):
        assert mine == its, f"the doors disagree: {ask}"
    return answers[: len(asks)]


async def ask_alone(cluster: Cluster, asks: Sequence[Ask]) -> list[Answer]:
    """One after the other, over gRPC."""
    async with await AsyncClient.connect(cluster.grpc_address) as client:
        return [await GrpcDoor(client).ask(ask) for ask in asks]


class Judge:
    """The reference for one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.texts = TextTruth(folder)
        self._model = load_reference(folder)

    def outputs(self, ask: Ask, answer: Answer) -> list[Output]:
        """The choices with the logits that they were drawn from."""
        prompt = ask.prompt_ids(self.texts)
        return [
            Output(
                prompt,
                tuple(told.tokens),
                ask.params(choice),
                ask.limits,
                raw_logits(self._model, [*prompt, *told.tokens][: len(prompt) + len(told.tokens)]),
            )
            for choice, told in enumerate(answer.choices)
        ]

    def judge(self, ask: Ask, answer: Answer, outputs: Sequence[Output], figures: Figures) -> None:
        """Raises AssertionError with the first thing wrong; counts into `figures`."""
        prompt = ask.prompt_ids(self.texts)
        assert answer.usage == (len(prompt), sum(len(told.tokens) for told in answer.choices)), ask
        for told, output in zip(answer.choices, outputs, strict=True):
            wrong = wrong_tokens(output)
            figures.wrong += len(wrong)
            assert not wrong, (wrong, ask, told)
            self._judge_text(ask, told)
            self._judge_logprobs(ask, told, output, figures)
            figures.choices += 1
            figures.tokens += len(told.tokens)
            figures.finishes[told.finish] = figures.finishes.get(told.finish, 0) + 1

    def _judge_text(self, ask: Ask, told: Told) -> None:
        ended = self.texts.ended(told.tokens, ask.ends, skip_special=ask.skip_special)
        assert ended is not None, (ask, told)
        echoed = ask.echoed(self.texts)
        mine = Ended(len(told.tokens), told.text.removeprefix(echoed), told.finish)
        assert told.text.startswith(echoed), (ask, told)
        assert mine == ended, (ask, told)

    def _judge_logprobs(self, ask: Ask, told: Told, output: Output, figures: Figures) -> None:
        if ask.logprobs is None:
            assert not told.logprobs
            assert not told.prompt_logprobs
            return
        start = len(output.prompt)
        assert len(told.logprobs) == len(told.tokens), ask
        assert len(told.prompt_logprobs) == (start - 1 if ask.echo else 0), ask
        rows, tokens = output.raw, output.prompt + output.tokens
        worst = max(
            worst_logprob(rows[start - 1 :], tokens[start:], ask.logprobs, told.logprobs),
            worst_logprob(rows, tokens[1:], ask.logprobs, told.prompt_logprobs),
        )
        assert worst <= 1, (worst, ask, told)
        figures.worst_logprob = max(figures.worst_logprob, worst)
        figures.logprobs += len(told.logprobs)
        figures.prompt_logprobs += len(told.prompt_logprobs)


def worst_logprob(
    rows: Sequence[Sequence[float]], tokens: Sequence[int], count: int, told: Sequence[Logprobs]
) -> float:
    """The largest error of a run of places, in units of what is allowed."""
    errors = (
        logprob_error(row, token, count, one) for row, token, one in zip(rows, tokens, told, strict=False)
    )
    return max(errors, default=-math.inf)
