from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from baton.engine.sampling.reference import Sampling, sample
from baton.engine.sequence import SamplingParams
from tests.engine.token_filters import filtered

DRAWS = 20_000
VOCAB = 37


def sampling(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 1,
) -> Sampling:
    params = SamplingParams(temperature, top_k, top_p, seed, min_p)
    return Sampling.of_params([params] * rows, torch.device("cpu"))


def kept(logits: Tensor, **filters: Any) -> list[bool]:
    """The tokens of one row that the filters leave."""
    return (filtered(logits, SamplingParams(1.0, **filters)) > -torch.inf)[0].tolist()


def logits_row(seed: int = 0) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def reference_distribution(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Token by token, in plain Python: what is kept, and with which probability."""
    probabilities = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(logits)), key=lambda i: -float(probabilities[i]))
    kept = order[:top_k] if top_k else order
    mass = float(probabilities[kept].sum())
    nucleus: list[int] = []
    reached = 0.0
    for token in kept:
        if nucleus and reached >= top_p:
            break
        nucleus.append(token)
        reached += float(probabilities[token]) / mass
    nucleus = [token for token in nucleus if probabilities[token] >= min_p * probabilities[order[0]]]
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    return result


@pytest.mark.parametrize(
    "filters",
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (0.9, 8, 0.6, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.4, 20, 0.95, 0.1),
    ],
)
def test_frequencies_follow_the_distribution(filters: tuple[float, int, float, float]) -> None:
    row = logits_row()
    expected = reference_distribution(row, *filters)
    tokens = sample(row.expand(DRAWS, -1), sampling(DRAWS, *filters), torch.arange(DRAWS) + 17)
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any()
    # Rare tokens are pooled, so that chi-square's approximation holds.
    common = expected * DRAWS >= 10
    observed = [*counts[common].tolist(), int(counts[~common].sum())]
    predicted = [*(expected[common] * DRAWS).tolist(), float(expected[~common].sum() * DRAWS)]
    if predicted[-1] == 0:
        observed, predicted = observed[:-1], predicted[:-1]
    if len(observed) > 1:
        assert stats.chisquare(observed, predicted).pvalue > 1e-3


def test_draws_over_seeds_follow_the_distribution_too() -> None:
    row = logits_row(3)
    seeds = dataclasses.replace(sampling(DRAWS), seed=torch.arange(DRAWS) * 7919)
    counts = torch.bincount(sample(row.expand(DRAWS, -1), seeds, torch.zeros(DRAWS).long()), minlength=VOCAB)
    expected = reference_distribution(row, 1.0, 0, 1.0, 0.0)
    assert stats.chisquare(counts.tolist(), (expected * DRAWS).tolist()).pvalue > 1e-3


def test_temperature_zero_takes_the_lowest_index_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-torch.inf, -2.0, -3.0, -2.0]])
    assert sample(logits, sampling(3, temperature=0.0), torch.arange(3)).tolist() == [1, 0, 1]


def test_ties_at_the_threshold_are_kept() -> None:
    logits = torch.tensor([[math.log(2), 0.0, 0.0, 0.0, -1.0]], dtype=torch.float64)
    for filters in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert kept(logits, **filters) == [True, True, True, True, False], filters


def test_top_p_counts_only_what_top_k_left() -> None:
    # Alone, top-p 0.6 would keep two tokens; of the two that top-k leaves, the first has 4/7 < 0.6.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().double()
    assert sum(kept(logits, top_k=2, top_p=0.57)) == 1
    assert sum(kept(logits, top_p=0.57)) == 2
    # With three left, all are needed: 4/9 and 3/9 do not reach 0.85.
    assert sum(kept(logits, top_k=3, top_p=0.85)) == 3


def test_min_p_is_a_share_of_the_likeliest() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().double()
    assert kept(logits, min_p=0.6) == [True, True, False, False]
    assert kept(logits, min_p=1.0) == [True, False, False, False]
    assert kept(logits, top_k=3, min_p=0.1) == [True, True, True, False]


def test_top_n_sigma_counts_deviations_of_all_logits_from_the_largest() -> None:
    # Mean 2, standard deviation sqrt(2): 1.5 of them below 4 is 1.88.
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    assert kept(logits, top_n_sigma=1.5) == [False, False, True, True, True]
    assert kept(logits, top_n_sigma=0.5) == [False, False, False, False, True]
    # What edits have dropped does not count: without it, mean 3 and sqrt(2 / 3).
    edited = torch.tensor([[-torch.inf, -torch.inf, 2.0, 3.0, 4.0]], dtype=torch.float64)
    assert kept(edited, top_n_sigma=1.5) == [False, False, False, True, True]
    assert kept(torch.full((1, 4), 7.0, dtype=torch.float64), top_n_sigma=0.1) == [True] * 4


def test_top_p_counts_only_what_top_n_sigma_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().double()
    assert sum(kept(logits, top_p=0.57)) == 2
    assert kept(logits, top_n_sigma=0.6) == [True, True, False, False]
    assert sum(kept(logits, top_p=0.57, top_n_sigma=0.6)) == 1


def test_top_n_sigma_is_the_same_at_any_temperature() -> None:
    row = logits_row(2)[None].double()
    params = [SamplingParams(t, top_n_sigma=1.25) for t in (0.1, 1.0, 30.0)]
    left = [(filtered(row, one) > -torch.inf).tolist() for one in params]
    assert left[0] == left[1] == left[2]
    assert 0 < sum(left[0][0]) < VOCAB


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_a_tiny_top_p_keeps_the_best(top_p: float) -> None:
    row = logits_row()
    tokens = sample(row.expand(50, -1), sampling(50, top_p=top_p), torch.arange(50))
    assert set(tokens.tolist()) == {int(row.argmax())}


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    row = logits_row()[None].double()
    assert torch.equal(filtered(row, SamplingParams(1.0, 10**12)), row)


def test_a_row_depends_on_nothing_else_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = 24
    logits = torch.randn(rows, VOCAB, generator=generator) * 2
    mixed = dataclasses.replace(
        sampling(rows),
        temperature=torch.rand(rows, generator=generator) * (torch.arange(rows) % 4 > 0),
        top_k=torch.randint(0, 9, (rows,), generator=generator),
        top_p=torch.rand(rows, generator=generator) + 0.3,
        seed=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        min_p=torch.rand(rows, generator=generator) * 0.2 * (torch.arange(rows) % 3 > 0),
    )
    positions = torch.randint(0, 5000, (rows,), generator=generator)
    together = sample(logits, mixed, positions)
    for i in range(rows):
        assert sample(logits[i : i + 1], mixed.at(torch.tensor([i])), positions[i : i + 1]) == together[i]
    assert (together != sample(logits, mixed, positions + 1)).any()
    assert together[0] == logits[0].argmax()


def test_half_precision_logits_draw_as_their_values() -> None:
    row = logits_row().bfloat16()
    parameters, positions = sampling(200, top_k=6), torch.arange(200)
    tokens = sample(row.expand(200, -1), parameters, positions)
    assert torch.equal(tokens, sample(row.double().expand(200, -1), parameters, positions))
