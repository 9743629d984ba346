"""Frequencies with which the full sampler draws each token, by chi-square, and the real sizes, on a GPU."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from scipy import stats
from torch import Tensor

from baton.engine.sequence import SamplingParams
from tests.engine.decode.test_graph_sampler import check, random_logits, random_request
from tests.engine.sampled_batch import Request, SampledBatch
from tests.support.sampling.random_sampling import random_features

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
VOCAB = 128_256
WARM = SamplingParams(0.9)
KINDS = {
    "temperature": WARM,
    "top-k": dataclasses.replace(WARM, top_k=12),
    "top-p": dataclasses.replace(WARM, top_p=0.8),
    "min-p": dataclasses.replace(WARM, min_p=0.1),
    "top-n-sigma": dataclasses.replace(WARM, top_n_sigma=7.0),
    "top-p of top-n-sigma": dataclasses.replace(WARM, top_p=0.8, top_n_sigma=7.0),
    "all filters": dataclasses.replace(WARM, top_k=40, top_p=0.9, min_p=0.02, top_n_sigma=8.0),
    "bias": dataclasses.replace(WARM, top_p=0.9, logit_bias=((3, 2.0), (11, -1.5))),
    "penalties": dataclasses.replace(WARM, repetition_penalty=1.3, presence_penalty=0.5),
    "greedy": SamplingParams(),
}


def judge(counts: Tensor, expected: Tensor, draws: int) -> None:
    """Counts of `draws` draws against how likely each token is; what is rare is taken together."""
    assert not counts[expected == 0].any()
    common = expected * draws >= 10
    observed = [*counts[common].tolist(), int(counts[~common].sum())]
    predicted = [*(expected[common] * draws).tolist(), float(expected[~common].sum() * draws)]
    if predicted[-1] < 1:
        predicted = [one / sum(predicted[:-1]) * sum(observed[:-1]) for one in predicted]
        observed, predicted = observed[:-1], predicted[:-1]
    assert len(observed) > 1
    scale = sum(observed) / sum(predicted)
    assert stats.chisquare(observed, [one * scale for one in predicted]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("rows", "dtype"), [(64, torch.bfloat16), (64, torch.float32), (256, torch.bfloat16)]
)
def test_real_sizes_equal_the_reference(rows: int, dtype: torch.dtype) -> None:
    rng = random.Random(rows)
    for head in (0, 70_000):
        requests = [random_request(rng, VOCAB, random_features(rng)) for _ in range(rows)]
        batch = SampledBatch(requests, VOCAB, device=DEVICE, head=head)
        order = rng.sample(range(rows), rows)
        check(batch, random_logits(rng, rows, VOCAB, dtype), order, head=head)


def test_draws_of_a_mixed_batch_follow_what_edits_and_filters_leave() -> None:
    kinds, turns, rows = [*KINDS.values()], 150, 256
    requests = [Request(dataclasses.replace(kinds[i % len(kinds)], seed=i)) for i in range(rows)]
    batch = SampledBatch(requests, VOCAB, device=DEVICE)
    one = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) - 3
    one[:60] += 9
    logits = one.bfloat16().to(DEVICE).expand(rows, -1).contiguous()
    order = list(range(rows))
    _, scaled, left = batch.filtered(logits, order)
    expected = scaled.masked_fill(~left, -torch.inf).softmax(-1).cpu()
    drawn = []
    for _ in range(turns):
        drawn.append(batch.drawn(logits, order))
        batch.state.position += 1  # other noise
    tokens = torch.tensor(drawn)
    for number, name in enumerate(KINDS):
        if name == "greedy":
            assert set(tokens[:, number :: len(kinds)].flatten().tolist()) == {int(logits[0].argmax())}
            continue
        mine = tokens[:, number :: len(kinds)].flatten()
        judge(torch.bincount(mine, minlength=VOCAB), expected[number], mine.numel())
