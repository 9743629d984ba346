"""Judges sampled outputs token by token: the reference's logits, teacher-forced, and the plain sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.engine.sequence import Limits, SamplingParams
from baton.engine.shared_memory.logprob_records import Logprobs
from tests.support.sampling.naive_sampler import naive_logprobs, naive_token

# raw logits, parameters, limits, prompt, output so far → token
Sampler = Callable[[Sequence[float], SamplingParams, Limits, Sequence[int], Sequence[int]], int]
# The wire's logprobs are float32, whose own rounding is above 1e-6 beyond 16.
LARGEST_ERROR = 1e-6
LARGEST_RELATIVE_ERROR = 1e-7


@dataclass(frozen=True)
class Output:
    """An output with what drew it: a row of `raw` is the logits after each token but the last."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams
    limits: Limits
    raw: list[list[float]]


def wrong_tokens(output: Output, sampler: Sampler = naive_token) -> list[int]:
    """The numbers of tokens that the sampler does not draw after all those before."""
    rows = output.raw[len(output.prompt) - 1 :]
    return [
        number
        for number, token in enumerate(output.tokens)
        if token != sampler(rows[number], output.params, output.limits, output.prompt, output.tokens[:number])
    ]


def logprob_error(raw: Sequence[float], token: int, count: int, reported: Logprobs) -> float:
    """The largest difference of what was reported of a token and the `count` likeliest beside it, in units of
    what is allowed; infinite where others were reported than these."""
    chosen, top = naive_logprobs(raw, token, count)
    if [one for one, _ in reported.top] != [one for one, _ in top]:
        return math.inf
    pairs = [
        (reported.logprob, chosen),
        *((mine, its) for (_, mine), (_, its) in zip(reported.top, top, strict=True)),
    ]
    return max(abs(mine - its) / allowed(its) for mine, its in pairs)


def allowed(logprob: float) -> float:
    """The error that a reported logprob may have."""
    return max(LARGEST_ERROR, LARGEST_RELATIVE_ERROR * abs(logprob))
