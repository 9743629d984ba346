"""Asks many requests of a cluster side by side, and judges every answer by the reference."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai

from baton.client import AsyncClient
from baton.engine.shared_memory.logprob_records import Logprobs
from tests.e2e.support.cluster import Cluster
from tests.e2e.tokens.sampled_answers import Answer, Api, GrpcApi, OpenAIApi, Reported
from tests.e2e.tokens.sampled_asks import Ask
from tests.support.reference import load_reference, raw_logits
from tests.support.sampling.sampler_truth import Output, logprob_error, wrong_tokens
from tests.support.text_truth import Ended, TextTruth


@dataclass(slots=True)
class Figures:
    """Counts of a proof's requests and tokens."""

    choices: int = 0
    tokens: int = 0
    wrong: int = 0
    logprobs: int = 0
    prompt_logprobs: int = 0
    # In units of what is allowed, which is 1e-6 up to logprobs of 10.
    worst_logprob: float = 0.0
    finishes: dict[str, int] = field(default_factory=dict)


async def ask_both_apis(
    cluster: Cluster, texts: TextTruth, asks: Sequence[Ask], at_once: int
) -> list[Answer]:
    """Every request over gRPC and, every other one streamed, over HTTP; the APIs must agree to the bit."""
    turn = asyncio.Semaphore(at_once)
    url = f"{cluster.url}/v1"
    async with (
        await AsyncClient.connect(cluster.grpc_address) as grpc,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=100) as http,
    ):
        streamed, whole = OpenAIApi(http, texts, stream=True), OpenAIApi(http, texts, stream=False)

        async def at(api: Api, ask: Ask) -> Answer:
            async with turn:
                return await api.ask(ask)

        over_grpc = [at(GrpcApi(grpc), ask) for ask in asks]
        over_http = [at(whole if number % 2 else streamed, ask) for number, ask in enumerate(asks)]
        # In the order of asking, the two of one request are far from each other.
        answers = await asyncio.gather(*over_grpc, *over_http)
    for ask, mine, its in zip(asks, answers, answers[len(asks) :], strict=False):
        assert mine == its, f"the APIs disagree: {ask}"
    return answers[: len(asks)]


async def ask_alone(cluster: Cluster, asks: Sequence[Ask]) -> list[Answer]:
    """One after the other, over gRPC."""
    async with await AsyncClient.connect(cluster.grpc_address) as client:
        return [await GrpcApi(client).ask(ask) for ask in asks]


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
                tuple(reported.tokens),
                ask.params(choice),
                ask.limits,
                raw_logits(self._model, [*prompt, *reported.tokens][: len(prompt) + len(reported.tokens)]),
            )
            for choice, reported in enumerate(answer.choices)
        ]

    def judge(self, ask: Ask, answer: Answer, outputs: Sequence[Output], figures: Figures) -> None:
        """Raises AssertionError with the first thing wrong; counts into `figures`."""
        prompt = ask.prompt_ids(self.texts)
        assert answer.usage == (len(prompt), sum(len(reported.tokens) for reported in answer.choices)), ask
        for reported, output in zip(answer.choices, outputs, strict=True):
            wrong = wrong_tokens(output)
            figures.wrong += len(wrong)
            assert not wrong, (wrong, ask, reported)
            self._judge_text(ask, reported)
            self._judge_logprobs(ask, reported, output, figures)
            figures.choices += 1
            figures.tokens += len(reported.tokens)
            figures.finishes[reported.finish] = figures.finishes.get(reported.finish, 0) + 1

    def _judge_text(self, ask: Ask, reported: Reported) -> None:
        ended = self.texts.ended(reported.tokens, ask.ends, skip_special=ask.skip_special)
        assert ended is not None, (ask, reported)
        echoed = ask.echoed(self.texts)
        mine = Ended(len(reported.tokens), reported.text.removeprefix(echoed), reported.finish)
        assert reported.text.startswith(echoed), (ask, reported)
        assert mine == ended, (ask, reported)

    def _judge_logprobs(self, ask: Ask, reported: Reported, output: Output, figures: Figures) -> None:
        if ask.logprobs is None:
            assert not reported.logprobs
            assert not reported.prompt_logprobs
            return
        start = len(output.prompt)
        assert len(reported.logprobs) == len(reported.tokens), ask
        assert len(reported.prompt_logprobs) == (start - 1 if ask.echo else 0), ask
        rows, tokens = output.raw, output.prompt + output.tokens
        worst = max(
            worst_logprob(rows[start - 1 :], tokens[start:], ask.logprobs, reported.logprobs),
            worst_logprob(rows, tokens[1:], ask.logprobs, reported.prompt_logprobs),
        )
        assert worst <= 1, (worst, ask, reported)
        figures.worst_logprob = max(figures.worst_logprob, worst)
        figures.logprobs += len(reported.logprobs)
        figures.prompt_logprobs += len(reported.prompt_logprobs)


def worst_logprob(
    rows: Sequence[Sequence[float]], tokens: Sequence[int], count: int, reported: Sequence[Logprobs]
) -> float:
    """The largest error of a run of places, in units of what is allowed."""
    errors = (
        logprob_error(row, token, count, one) for row, token, one in zip(rows, tokens, reported, strict=False)
    )
    return max(errors, default=-math.inf)
