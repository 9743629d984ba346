"""The sampler's features on given logits, against plain Python and transformers: alone, combined, mixed."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.engine.prefill.first_token import draw_first, first_logprobs
from baton.engine.sampling.logit_edits import Bias, HeldStops, LogitEdits, Penalties
from baton.engine.sampling.logprobs import likeliest, logprobs_of
from baton.engine.sampling.reference import Sampling, sample
from baton.engine.sampling.slot_sampler import TokenCounts
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.engine.shared_memory.logprob_records import Logprobs
from tests.engine.token_filters import filtered
from tests.support.sampling.naive_sampler import naive_distribution, naive_edited, naive_logprobs, naive_token
from tests.support.sampling.random_sampling import FEATURES, random_features, random_limits, random_params

VOCAB = 41
DRAWS = 20_000


def random_sequence(rng: random.Random, features: frozenset[str]) -> Sequence:
    prompt = rng.choices(range(VOCAB), k=rng.randint(1, 20))
    output = rng.choices(range(VOCAB // 2), k=rng.randint(0, 12))
    limits = random_limits(rng, features, VOCAB, 15)
    params = random_params(rng, features, VOCAB)
    return Sequence((*prompt, *output), len(prompt), params, limits)


def split(sequence: Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return sequence.token_ids[: sequence.prompt_length], sequence.token_ids[sequence.prompt_length :]


def random_logits(rows: int, seed: int) -> Tensor:
    """Half of them rounded, so that there are ties."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    logits[::2] = (logits[::2] * 2).round() / 2
    return logits


def drawn(logits: Tensor, sequences: list[Sequence]) -> list[tuple[int, Logprobs | None]]:
    tokens = draw_first(logits, sequences)
    return list(zip(tokens.tolist(), first_logprobs(logits, tokens, sequences), strict=True))


@pytest.mark.parametrize("feature", [*FEATURES, "combined"])
def test_tokens_equal_plain_python_in_mixed_batches_and_alone(feature: str) -> None:
    rng = random.Random(feature)
    for batch in range(6):
        sequences = [
            random_sequence(rng, random_features(rng) if feature == "combined" else frozenset([feature]))
            for _ in range(10)
        ]
        plain = [random_sequence(rng, frozenset()) for _ in range(3)]
        sequences = rng.sample(sequences + plain, len(sequences) + len(plain))
        logits = random_logits(len(sequences), batch)
        together = drawn(logits, sequences)
        for row, sequence in enumerate(sequences):
            raw, (prompt, output) = logits[row].tolist(), split(sequence)
            params, limits = sequence.sampling, sequence.limits
            assert together[row][0] == naive_token(raw, params, limits, prompt, output), params
            assert drawn(logits[row : row + 1], [sequence]) == [together[row]]
            reported = together[row][1]
            if params.logprobs is None:
                assert reported is None
                continue
            assert reported is not None
            chosen, top = naive_logprobs(raw, together[row][0], params.logprobs)
            assert reported.logprob == pytest.approx(chosen, abs=1e-12)
            assert [token for token, _ in reported.top] == [token for token, _ in top]
            assert [value for _, value in reported.top] == pytest.approx([v for _, v in top], abs=1e-12)


@pytest.mark.parametrize("feature", sorted({*FEATURES} - {"temperature", "logprobs", "top_k", "top_p"}))
def test_each_feature_matters_in_these_cases(feature: str) -> None:
    rng = random.Random(feature)
    changed = 0
    for case in range(40):
        sequence = random_sequence(rng, frozenset([feature]))
        prompt, output = split(sequence)
        raw = random_logits(1, case)[0].tolist()
        off = SamplingParams(temperature=sequence.sampling.temperature, seed=sequence.sampling.seed)
        with_it = naive_token(raw, sequence.sampling, sequence.limits, prompt, output)
        changed += with_it != naive_token(raw, off, Limits(15), prompt, output)
    assert changed


def penalties_alone(sequence: Sequence) -> Penalties:
    counts = TokenCounts.zeros(1, VOCAB, torch.device("cpu"))
    counts.set(0, *split(sequence))
    params = sequence.sampling
    numbers = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    repetition, presence, frequency = (torch.tensor([number]) for number in numbers)
    row = torch.tensor([0])
    return Penalties(row, repetition, presence, frequency, counts.in_prompt, counts.in_output)


def edits_alone(sequence: Sequence) -> LogitEdits:
    bias, stops = sequence.sampling.logit_bias, list(sequence.limits.stop_token_ids)
    ids = torch.tensor([[token for token, _ in bias]], dtype=torch.int64)
    return LogitEdits(
        bias=Bias(torch.tensor([0]), ids, torch.tensor([[value for _, value in bias]])),
        penalties=penalties_alone(sequence),
        held_stops=HeldStops(torch.tensor([0]), torch.tensor([stops], dtype=torch.int64))
        if sequence.length < sequence.stops_from
        else None,
    )


def test_bias_repetition_min_tokens_and_filters_equal_transformers() -> None:
    rng = random.Random(3)
    # transformers has no top-n-sigma.
    names = frozenset(FEATURES) - {"presence_penalty", "frequency_penalty", "logprobs", "top_n_sigma"}
    for case in range(60):
        sequence = random_sequence(rng, names)
        params, limits = sequence.sampling, sequence.limits
        raw = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(case), dtype=torch.float64) * 3
        processors: list[LogitsProcessor] = [
            SequenceBiasLogitsProcessor({(token,): value for token, value in params.logit_bias}),
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            MinNewTokensLengthLogitsProcessor(
                sequence.prompt_length, limits.min_tokens, list(limits.stop_token_ids), device="cpu"
            ),
            TemperatureLogitsWarper(params.temperature),
            TopKLogitsWarper(params.top_k),
            TopPLogitsWarper(params.top_p),
            MinPLogitsWarper(params.min_p),
        ]
        expected = LogitsProcessorList(processors)(torch.tensor([sequence.token_ids]), raw.clone())
        got = filtered(edits_alone(sequence).applied(raw), params)
        assert torch.allclose(got, expected, rtol=1e-12, atol=0), params


BIAS = ((3, 1.5), (7, -2.0), (11, 0.75))
MILD = SamplingParams(temperature=1.0)
DISTRIBUTIONS = {
    "bias": (dataclasses.replace(MILD, logit_bias=BIAS), 0),
    "repetition": (dataclasses.replace(MILD, repetition_penalty=1.5), 0),
    "presence and frequency": (dataclasses.replace(MILD, presence_penalty=0.75, frequency_penalty=0.5), 0),
    "min tokens": (MILD, 9),
    "all": (SamplingParams(1.25, 30, 0.9375, 0, 0.03125, 1.25, 0.5, 0.25, BIAS, top_n_sigma=2.5), 9),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_distribution_that_edits_and_filters_leave(name: str) -> None:
    params, min_tokens = DISTRIBUTIONS[name]
    token_ids = (1, 2, 3, 4, 5, 3, 8, 8, 8, 11)
    sequence = Sequence(token_ids, 5, params, Limits(20, (6, 9, 12), min_tokens))
    raw = random_logits(2, 5)[1]
    edited = edits_alone(sequence).applied(raw[None])[0]
    prompt, output = split(sequence)
    assert edited.tolist() == naive_edited(raw.tolist(), params, sequence.limits, prompt, output)
    scaled = [logit / params.temperature for logit in edited.tolist()]
    expected = torch.tensor(naive_distribution(scaled, params), dtype=torch.float64)
    sampling = Sampling.of_params([params] * DRAWS, torch.device("cpu"))
    sampling = dataclasses.replace(sampling, seed=torch.arange(DRAWS) * 7919)
    tokens = sample(edited.expand(DRAWS, -1), sampling, torch.full((DRAWS,), sequence.length))
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any()
    common = expected * DRAWS >= 10
    observed = [*counts[common].tolist(), int(counts[~common].sum())]
    predicted = [*(expected[common] * DRAWS).tolist(), float(expected[~common].sum() * DRAWS)]
    if predicted[-1] == 0:
        observed, predicted = observed[:-1], predicted[:-1]
    assert len(observed) > 1
    assert stats.chisquare(observed, predicted).pvalue > 1e-3


def test_of_equals_the_lowest_ids_are_the_likeliest() -> None:
    values = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0], [2.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    assert likeliest(values, 4).tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [5, 4, 3, 2]]
    assert likeliest(values, 6)[0].tolist() == [1, 3, 0, 2, 4, 5]
    assert likeliest(values, 0).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_raw_logits_in_float64(dtype: torch.dtype) -> None:
    logits = (random_logits(5, 9) * 3).to(dtype)
    tokens = torch.tensor([4, 0, 40, 7, 3])
    batch = logprobs_of(logits, tokens, [3, 0], [20, 2])
    whole = logits.double().log_softmax(-1)
    assert batch.rows.tolist() == [3, 0]
    assert [its.logprob for its in batch.all()] == [float(whole[3, 7]), float(whole[0, 4])]
    assert [len(its.top) for its in batch.all()] == [20, 2]
    assert all(value == float(whole[3, token]) for token, value in batch.all()[0].top)


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    (its,) = logprobs_of(random_logits(1, 1)[:, :7], torch.tensor([0]), [0], [20]).all()
    assert sorted(token for token, _ in its.top) == list(range(7))
