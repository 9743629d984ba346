"""The sampler once more, token by token in plain Python: slow, and with no batch to be wrong in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from baton.engine.sequence import Limits, SamplingParams
from tests.support.sampling.philox_noise import draw_noise


def naive_token(
    raw: Sequence[float],
    params: SamplingParams,
    limits: Limits,
    prompt: Sequence[int],
    output: Sequence[int],
) -> int:
    """The token that follows prompt and output, whose raw logits these are."""
    logits = naive_edited(raw, params, limits, prompt, output)
    if params.temperature == 0:
        return logits.index(max(logits))
    scaled = [logit / params.temperature for logit in logits]
    return naive_draw(scaled, naive_kept(scaled, params), params.seed, len(prompt) + len(output))


def naive_draw(scaled: Sequence[float], kept: set[int], seed: int, position: int) -> int:
    """The token drawn at a position of those that the filters have left."""
    noise = draw_noise(seed, position, len(scaled))
    return max(sorted(kept), key=lambda token: scaled[token] + noise[token])


def naive_edited(
    raw: Sequence[float],
    params: SamplingParams,
    limits: Limits,
    prompt: Sequence[int],
    output: Sequence[int],
) -> list[float]:
    """Logits after bias, penalties and the stop ids held back."""
    logits = list(raw)
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= params.frequency_penalty * list(output).count(token)
        logits[token] -= params.presence_penalty
    if len(output) < limits.min_tokens:
        for token in limits.stop_token_ids:
            logits[token] = -math.inf
    return logits


def naive_kept(scaled: Sequence[float], params: SamplingParams) -> set[int]:
    """The tokens that top-n-sigma, top-k, top-p and min-p leave, ties at each threshold included."""
    weight = _softmax(scaled)
    left = [token for token in range(len(scaled)) if weight[token] > 0]
    if params.top_n_sigma > 0:
        deviation = statistics.pstdev(logit for logit in scaled if logit > -math.inf)
        smallest = max(scaled) - params.top_n_sigma * deviation
        left = [token for token in left if scaled[token] >= smallest]
    if 0 < params.top_k < len(scaled):
        smallest = sorted((scaled[token] for token in left), reverse=True)[: params.top_k][-1]
        left = [token for token in left if scaled[token] >= smallest]
    if params.top_p < 1:
        mass = sum(weight[token] for token in left)
        reached, smallest = 0.0, math.inf
        for token in sorted(left, key=lambda token: -scaled[token]):
            if reached >= params.top_p and smallest < math.inf:
                break
            reached += weight[token] / mass
            smallest = scaled[token]
        left = [token for token in left if scaled[token] >= smallest]
    return {token for token in left if weight[token] >= params.min_p * max(weight)}


def naive_logprobs(raw: Sequence[float], token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """The token's logprob and the `count` likeliest, of equals the lowest id first."""
    largest = max(raw)
    total = math.log(math.fsum(math.exp(logit - largest) for logit in raw)) + largest
    best = sorted(range(len(raw)), key=lambda one: (-raw[one], one))[:count]
    return raw[token] - total, [(one, raw[one] - total) for one in best]


def naive_distribution(scaled: Sequence[float], params: SamplingParams) -> list[float]:
    """The probability of each token to be drawn."""
    kept = naive_kept(scaled, params)
    return _softmax([logit if token in kept else -math.inf for token, logit in enumerate(scaled)])


def _softmax(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
