"""Samplers that are wrong in one thing each: what a judge must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from baton.engine.sequence import Limits, SamplingParams
from tests.support.sampling.naive_sampler import naive_draw, naive_edited, naive_kept, naive_token
from tests.support.sampling.sampler_truth import Sampler


def _with(**changed: Any) -> Sampler:
    """The sampler with other parameters."""

    def sampler(
        raw: Sequence[float],
        params: SamplingParams,
        limits: Limits,
        prompt: Sequence[int],
        output: Sequence[int],
    ) -> int:
        return naive_token(raw, dataclasses.replace(params, **changed), limits, prompt, output)

    return sampler


def _next_seed(
    raw: Sequence[float], params: SamplingParams, limits: Limits, prompt: Sequence[int], output: Sequence[int]
) -> int:
    other = dataclasses.replace(params, seed=(params.seed + 1) % 2**64)
    return naive_token(raw, other, limits, prompt, output)


def _next_position(
    raw: Sequence[float], params: SamplingParams, limits: Limits, prompt: Sequence[int], output: Sequence[int]
) -> int:
    return naive_token(raw, params, limits, [*prompt, prompt[0]], output)


def _stops_not_held(
    raw: Sequence[float], params: SamplingParams, limits: Limits, prompt: Sequence[int], output: Sequence[int]
) -> int:
    return naive_token(raw, params, dataclasses.replace(limits, min_tokens=0), prompt, output)


def _repetition_forgets_the_prompt(
    raw: Sequence[float], params: SamplingParams, limits: Limits, prompt: Sequence[int], output: Sequence[int]
) -> int:
    return naive_token(raw, params, limits, [prompt[0]] * len(prompt), output)


def _presence_counts_the_prompt(
    raw: Sequence[float], params: SamplingParams, limits: Limits, prompt: Sequence[int], output: Sequence[int]
) -> int:
    return naive_token(raw, params, limits, [], [*prompt, *output])


def _temperature_before_edits(
    raw: Sequence[float], params: SamplingParams, limits: Limits, prompt: Sequence[int], output: Sequence[int]
) -> int:
    if not params.temperature:
        return naive_token(raw, params, limits, prompt, output)
    scaled = [logit / params.temperature for logit in raw]
    return naive_token(scaled, dataclasses.replace(params, temperature=1.0), limits, prompt, output)


def _penalties_before_bias(
    raw: Sequence[float], params: SamplingParams, limits: Limits, prompt: Sequence[int], output: Sequence[int]
) -> int:
    plain, bias = dataclasses.replace(params, logit_bias=()), dict(params.logit_bias)
    edited = naive_edited(raw, plain, limits, prompt, output)
    biased = [logit + bias.get(token, 0.0) for token, logit in enumerate(edited)]
    bare = dataclasses.replace(plain, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    return naive_token(biased, bare, Limits(limits.max_tokens), prompt, output)


def _top_p_over_all(
    raw: Sequence[float], params: SamplingParams, limits: Limits, prompt: Sequence[int], output: Sequence[int]
) -> int:
    if not params.temperature:
        return naive_token(raw, params, limits, prompt, output)
    edited = naive_edited(raw, params, limits, prompt, output)
    scaled = [logit / params.temperature for logit in edited]
    kept = naive_kept(scaled, dataclasses.replace(params, top_k=0)) & naive_kept(
        scaled, dataclasses.replace(params, top_p=1.0)
    )
    return naive_draw(scaled, kept, params.seed, len(prompt) + len(output))


def _top_n_sigma_last(
    raw: Sequence[float], params: SamplingParams, limits: Limits, prompt: Sequence[int], output: Sequence[int]
) -> int:
    if not params.temperature:
        return naive_token(raw, params, limits, prompt, output)
    edited = naive_edited(raw, params, limits, prompt, output)
    scaled = [logit / params.temperature for logit in edited]
    near = dataclasses.replace(params, top_k=0, top_p=1.0, min_p=0.0)
    kept = naive_kept(scaled, dataclasses.replace(params, top_n_sigma=0.0)) & naive_kept(scaled, near)
    return naive_draw(scaled, kept, params.seed, len(prompt) + len(output))


# Name → the features that a request must use for the difference to show, and the wrong sampler.
PERTURBED: dict[str, tuple[frozenset[str], Sampler]] = {
    "no temperature": (frozenset({"temperature"}), _with(temperature=1.0)),
    "no top-k": (frozenset({"top_k"}), _with(top_k=0)),
    "no top-p": (frozenset({"top_p"}), _with(top_p=1.0)),
    "no min-p": (frozenset({"min_p"}), _with(min_p=0.0)),
    "no top-n-sigma": (frozenset({"top_n_sigma"}), _with(top_n_sigma=0.0)),
    "top-n-sigma last": (frozenset({"top_n_sigma", "top_p"}), _top_n_sigma_last),
    "no repetition penalty": (frozenset({"repetition_penalty"}), _with(repetition_penalty=1.0)),
    "no presence penalty": (frozenset({"presence_penalty"}), _with(presence_penalty=0.0)),
    "no frequency penalty": (frozenset({"frequency_penalty"}), _with(frequency_penalty=0.0)),
    "no bias": (frozenset({"logit_bias"}), _with(logit_bias=())),
    "no min tokens": (frozenset({"min_tokens"}), _stops_not_held),
    "another seed": (frozenset({"temperature"}), _next_seed),
    "another position": (frozenset({"temperature"}), _next_position),
    "repetition forgets the prompt": (frozenset({"repetition_penalty"}), _repetition_forgets_the_prompt),
    "presence counts the prompt": (frozenset({"presence_penalty"}), _presence_counts_the_prompt),
    "temperature before all else": (frozenset({"temperature", "logit_bias"}), _temperature_before_edits),
    "penalties before bias": (frozenset({"repetition_penalty", "logit_bias"}), _penalties_before_bias),
    "top-p over all": (frozenset({"top_k", "top_p"}), _top_p_over_all),
}
