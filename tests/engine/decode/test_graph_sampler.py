"""The full sampler's kernels against `SlotSampler.draw`: tokens, kept sets, logprobs, held rows."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.sequence import Limits, SamplingParams
from baton.engine.shared_memory.mailbox import Feature
from tests.engine.sampled_batch import Request, SampledBatch
from tests.support.fewer import each_value_once
from tests.support.sampling.random_sampling import (
    FEATURES,
    as_float32,
    random_features,
    random_limits,
    random_params,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One chunk and several, whole words of masks and not, whole quads and not.
SHAPES = [(41, 64, torch.float32), (97, 32, torch.bfloat16), (130, 64, torch.float16)]


EDITS = Feature.BIAS | Feature.PENALTIES | Feature.MIN_TOKENS | Feature.MASKED


def random_logits(rng: random.Random, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Flat and peaked rows, some rounded, so that there are ties; one of equals."""
    made = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    made *= torch.tensor([rng.choice((0.01, 0.5, 2.0, 5.0)) for _ in range(rows)])[:, None]
    made[::3] = (made[::3] * 2).round() / 2
    made[rng.randrange(rows)] = rng.choice((1.5, -1.5, 0.0, -0.0))
    return made.to(dtype).to(DEVICE)


def random_request(rng: random.Random, vocab: int, features: frozenset[str]) -> Request:
    """The ids it names are among the first 600 tokens of a large vocabulary."""
    named = min(vocab, 600)
    params = random_params(rng, features, named)
    if params.top_k and rng.random() < 0.5:
        params = replace(params, top_k=rng.choice((1, vocab // 3, vocab - 1, vocab, 2 * vocab)))
    if "top_p" in features and rng.random() < 0.2:
        params = replace(params, top_p=rng.choice((0.0, 0.5, 0.75)))
    masked = rng.random() < 0.3
    mask = tuple(rng.sample(range(vocab), rng.randint(1, min(vocab, 5000)))) if masked else None
    return Request(
        params,
        random_limits(rng, features, named, 15),
        tuple(rng.choices(range(named), k=rng.randint(1, 20))),
        tuple(rng.choices(range(named // 2), k=rng.randint(1, 12))),
        mask,
        late=masked and rng.random() < 0.4,
    )


def check(batch: SampledBatch, logits: Tensor, order: list[int], head: int = 0) -> None:
    rows = batch.ready(order)
    tokens, reported = batch.expected(logits, order)
    edited, scaled, left = batch.filtered(logits, order)
    drawn = batch.drawn(logits, order)
    assert [drawn[row] for row in rows] == tokens
    assert batch.place[: len(order)].tolist() == [
        rows.index(n) if n in rows else -1 for n in range(len(order))
    ]
    warm = [row for row in rows if batch.requests[order[row]].params.temperature > 0]
    assert torch.equal(batch.kept(edited, scaled)[warm], left[warm])
    edits = [row for row in rows if int(batch.state.sampler.features[order[row]]) & int(EDITS)]
    assert torch.equal(batch.sampler.edited[edits].double(), edited[edits])
    for place, expected in enumerate(reported):
        record = batch.logprobs(head + place)
        if expected is None:
            assert record is None
            continue
        assert record is not None
        assert record.logprob == pytest.approx(expected.logprob, rel=1e-6, abs=1e-6)
        assert [token for token, _ in record.top] == [token for token, _ in expected.top]
        assert [v for _, v in record.top] == pytest.approx([v for _, v in expected.top], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("vocab", "chunk", "dtype"), SHAPES)
def test_rows_of_any_requests_equal_the_reference(vocab: int, chunk: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab)
    features = [frozenset(FEATURES), frozenset[str](), *(random_features(rng) for _ in range(4))]
    requests = [random_request(rng, vocab, some) for some in features]
    batch = SampledBatch(requests, vocab, chunk=chunk, device=DEVICE, head=5000)
    order = rng.sample(range(len(requests)), len(requests))
    check(batch, random_logits(rng, len(order), vocab, dtype), order, head=5000)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("vocab", "chunk", "dtype"), SHAPES)
def test_logits_that_are_no_numbers_draw_tokens_of_the_vocabulary(
    vocab: int, chunk: int, dtype: torch.dtype
) -> None:
    greedy, warm = SamplingParams(), SamplingParams(0.8)
    params = [greedy, replace(greedy, presence_penalty=0.5), replace(greedy, logprobs=3), warm]
    params += [replace(warm, top_k=5), replace(warm, top_p=0.9), replace(warm, min_p=0.1, top_n_sigma=3.0)]
    batch = SampledBatch([Request(one) for one in params], vocab, chunk=chunk, device=DEVICE)
    logits = torch.full((len(params), vocab), math.nan, dtype=dtype, device=DEVICE)
    drawn = batch.drawn(logits, batch.ready(list(range(len(params)))))
    assert all(0 <= token < vocab for token in drawn), drawn


@pytest.mark.slow
def test_more_candidates_than_are_held_at_once_and_chunks_in_several_pieces() -> None:
    params = (SamplingParams(0.8, 1600, 0.9), SamplingParams(1.5, 0, 0.7, min_p=1e-5))
    batch = SampledBatch([Request(one) for one in params], 3001, chunk=2048, device=DEVICE)
    logits = torch.randn(2, 3001, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    check(batch, logits, [1, 0])
    assert int(batch.sampler.space.counts.max()) * 4 > 3 * 128


def test_held_stops_are_held_until_min_tokens_and_no_longer() -> None:
    stops = Limits(20, (3, 5, 7), 4)
    requests = [Request(SamplingParams(), stops, output=(1,) * count) for count in (1, 2, 3, 4, 5)]
    batch = SampledBatch(requests, 41, chunk=32, device=DEVICE)
    # All were admitted while stops were held; two have come to where they no longer are.
    batch.state.sampler.features[:] |= int(Feature.MIN_TOKENS)
    logits = torch.zeros(5, 41, device=DEVICE)
    logits[:, 5] = 2
    logits[:, 9] = 1
    assert batch.drawn(logits, [0, 1, 2, 3, 4]) == [9, 9, 9, 5, 5]


def test_min_p_keeps_to_the_last_bit_what_the_reference_keeps() -> None:
    """Tokens next to each other in float32 on either side of the least share that is kept."""
    one = SamplingParams(0.7, min_p=0.625)
    floor = torch.tensor(math.log(0.625) * float(torch.tensor(0.7)), dtype=torch.float64).float()
    around = [floor]
    for _ in range(3):
        below, above = torch.tensor(-torch.inf), torch.tensor(torch.inf)
        around = [torch.nextafter(around[0], below), *around, torch.nextafter(around[-1], above)]
    logits = torch.cat([torch.zeros(1), torch.stack(around)]).expand(24, -1).contiguous().to(DEVICE)
    batch = SampledBatch([Request(replace(one, seed=n)) for n in range(24)], 8, chunk=8, device=DEVICE)
    check(batch, logits, list(range(24)))


TOP_N_SIGMA_WITH: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 50, "top_p": 0.999},
    {"top_k": 5},
    {"top_k": 50},
    {"top_p": 0.6},
    {"top_p": 0.999},
)


@pytest.mark.parametrize(
    "kinds", [TOP_N_SIGMA_WITH[:2], pytest.param(TOP_N_SIGMA_WITH, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_top_n_sigma_keeps_to_the_last_bit_what_the_reference_keeps(
    masked: bool, kinds: tuple[dict[str, Any], ...]
) -> None:
    """Tokens next to each other in float32 on either side of the least logit that is kept, with top-k and
    top-p of what is left."""
    torch.manual_seed(5)
    logits = torch.randn(1, 97) * 3
    mask = tuple(range(0, 97, 2)) if masked else None
    ids = torch.arange(97)[:: 2 if masked else 1]
    number = ids[logits[0, ids].sort(descending=True).indices[6]]  # the seventh is put at the threshold
    for _ in range(60):  # which it moves: a fixed point
        mine = logits[0, ids].double()
        logits[0, number] = mine.max() - 1.25 * mine.std(correction=0)
    around = []
    for steps in range(-3, 4):
        row, end = logits[0].clone(), torch.tensor(math.copysign(math.inf, steps))
        for _ in range(abs(steps)):
            row[number] = torch.nextafter(row[number], end)
        around.append(row)
    rows = torch.stack(around).to(DEVICE)
    counts = set()
    for kind in kinds:
        one = SamplingParams(0.7, top_n_sigma=1.25, **kind)
        requests = [Request(replace(one, seed=n), mask=mask) for n in range(len(around))]
        batch = SampledBatch(requests, 97, chunk=32, device=DEVICE)
        check(batch, rows, list(range(len(around))))
        left = batch.filtered(rows, list(range(len(around))))[2]
        counts |= set(left.sum(-1).tolist()) if not kind else set()
    assert max(counts) - min(counts) == 1


@pytest.mark.parametrize(("spread", "top_k"), each_value_once([0.3, 1e-4], [0, 450]))
def test_top_p_is_of_what_top_n_sigma_left(spread: float, top_k: int) -> None:
    """The rows are such that top-n-sigma drops half the probability. Where all but two tokens are nearly the
    same, those between the last bounds are enough for the search for the threshold to decide."""
    logits = torch.randn(6, 600, generator=torch.Generator().manual_seed(6)) * spread
    logits[:, 5], logits[:, 590] = 0.9, -0.9
    deviations = [as_float32(float(row.max() / row.double().std(correction=0))) for row in logits]
    params = [SamplingParams(0.7, top_k, 0.6, n, top_n_sigma=most) for n, most in enumerate(deviations)]
    rows, order = logits.to(DEVICE), list(range(6))
    batch = SampledBatch([Request(one) for one in params], 600, chunk=256, device=DEVICE)
    check(batch, rows, order)
    kept = batch.filtered(rows, order)[2].sum(-1)
    without = [Request(replace(one, top_n_sigma=0.0)) for one in params]
    batch = SampledBatch(without, 600, chunk=256, device=DEVICE)
    assert (batch.filtered(rows, order)[2].sum(-1) > kept).all()


@pytest.mark.slow
def test_top_n_sigma_of_chunks_in_several_pieces() -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 1600},
        {"top_p": 0.7},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    )
    requests = [Request(SamplingParams(0.8, top_n_sigma=1.9, **kind)) for kind in kinds]
    batch = SampledBatch(requests, 6001, chunk=2048, device=DEVICE)
    logits = torch.randn(len(kinds), 6001, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    check(batch, logits, [2, 0, 3, 1])


def test_where_nothing_may_be_drawn_the_first_token_is() -> None:
    """A mask may allow nothing; the infinities computed then do no harm."""
    requests = [Request(SamplingParams(t, 5, 0.9), mask=()) for t in (0.0, 0.7)]
    batch = SampledBatch(requests, 41, chunk=32, device=DEVICE)
    with np.errstate(all="ignore"):
        assert batch.drawn(torch.randn(2, 41, device=DEVICE), [0, 1]) == [0, 0]


def test_arrays_of_another_vocabulary_are_refused() -> None:
    batch = SampledBatch([Request(SamplingParams())], 41, chunk=32, device=DEVICE)
    with pytest.raises(ValueError, match="not of 300 tokens"):
        batch.drawn(torch.zeros(1, 300, device=DEVICE), [0])


@pytest.mark.parametrize(("vocab", "chunk", "dtype"), SHAPES)
def test_rows_of_drafts_see_the_drafts_before_them(vocab: int, chunk: int, dtype: torch.dtype) -> None:
    """A row of depth d is the first row of a request whose output has d tokens more: whatever it asks for,
    with a draft twice, and one with a bias."""
    rng = random.Random(vocab)
    penalized = SamplingParams(
        0.9, seed=5, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3
    )
    params = [
        penalized,
        replace(penalized, temperature=0.0, logit_bias=((7, 2.5), (9, -1.0)), logprobs=3),
        random_params(rng, frozenset(FEATURES), vocab),
        SamplingParams(0.7, 9, 0.9, seed=8),
    ]
    drafts = [(7, 9, 7, 40), (9,), (3, 3), (7, 8, 9)]
    requests = [
        Request(one, Limits(20, (7, 11), 4), tuple(rng.choices(range(40), k=5)), output=(2, 7))
        for one in params
    ]
    twins = [
        replace(request, output=(*request.output, *mine[:depth]))
        for request, mine in zip(requests, drafts, strict=True)
        for depth in range(1 + len(mine))
    ]
    logits = random_logits(rng, len(twins), vocab, dtype)
    alone, rows = SampledBatch(twins, vocab, chunk=chunk, device=DEVICE), list(range(len(twins)))
    expected, reported = alone.expected(logits, rows)
    edited, _, _ = alone.filtered(logits, rows)
    batch = SampledBatch(requests, vocab, chunk=chunk, device=DEVICE, rows=len(twins))
    order = [slot for slot, mine in enumerate(drafts) for _ in range(1 + len(mine))]
    depths = [depth for mine in drafts for depth in range(1 + len(mine))]
    tokens = [0 if depth == 0 else drafts[slot][depth - 1] for slot, depth in zip(order, depths, strict=True)]
    assert batch.drawn(logits, order, drafts=(tokens, depths)) == expected
    edits = [row for row, slot in enumerate(order) if requests[slot].params.penalizes]
    assert torch.equal(batch.sampler.edited[edits].double(), edited[edits])
    for place, one in enumerate(reported):
        record = batch.logprobs(place)
        assert (record is None) == (one is None)
        assert (
            record is None or one is None or record.logprob == pytest.approx(one.logprob, rel=1e-6, abs=1e-6)
        )
