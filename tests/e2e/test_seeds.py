"""A seed decides a request's tokens, whatever else runs and wherever; and what is drawn is drawn fairly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chisquare

from tests.e2e.cluster import Answer, Cluster, assert_all_free, baton_up
from tests.e2e.completions import complete
from tests.support.checkpoints import FAMILIES, VOCAB_SIZE
from tests.support.reference import load_reference, reference_logits

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

Floats = npt.NDArray[np.float64]

SEEDS = (0, 1, 2**32, 2**63, 2**64 - 1)
AT_ONCE = 32
MAX_TOKENS = 24
LEAST_P = 1e-3
LEAST_EXPECTED = 8.0


@dataclass(frozen=True)
class Draw:
    """How a request draws."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def fields(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def distribution(self, logits: Floats) -> Floats:
        """[vocab] logits → [vocab] probabilities: temperature, top-k, top-p over what top-k left."""
        order = np.argsort(-logits, kind="stable")
        weights = np.exp((logits[order] - logits[order[0]]) / self.temperature)
        if self.top_k:
            weights[self.top_k :] = 0
        reached = np.cumsum(weights / weights.sum())
        if self.top_p < 1:
            weights[int(np.searchsorted(reached, self.top_p)) + 1 :] = 0
        probabilities: Floats = np.empty_like(weights)
        probabilities[order] = weights / weights.sum()
        return probabilities


MIXES = (
    Draw(1.0),
    Draw(0.7, top_k=8),
    Draw(1.3, top_p=0.8),
    Draw(0.9, top_k=20, top_p=0.5),
    Draw(2.5, top_k=VOCAB_SIZE),
)


@dataclass(frozen=True)
class Ask:
    """One seeded request."""

    prompt: tuple[int, ...]
    draw: Draw
    seed: int
    max_tokens: int = MAX_TOKENS

    @property
    def fields(self) -> dict[str, Any]:
        own = {"seed": self.seed, "max_tokens": self.max_tokens, "ignore_eos": True}
        return {**self.draw.fields, **own}


def make_asks(seeds: Iterable[int], generator: random.Random) -> list[Ask]:
    """Every way to draw with every seed, after prompts of 1 to 150 tokens."""
    return [Ask(make_prompt(generator), draw, seed) for draw in MIXES for seed in seeds]


def make_prompt(generator: random.Random) -> tuple[int, ...]:
    return tuple(generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 150)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return FAMILIES[0].make(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Cluster]:
    """One worker of each role."""
    with baton_up(model, "--dtype", "float32", "--slots", str(AT_ONCE)) as cluster:
        yield cluster


async def run(
    cluster: Cluster, stub: RouterServiceAsyncStub, asks: Sequence[Ask], at_once: int
) -> list[Answer]:
    """The answers in order."""
    turn = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> Answer:
        async with turn:
            return await cluster.generate(stub, ask.prompt, **ask.fields)

    return await asyncio.gather(*map(one, asks))


def tokens(answers: Iterable[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


async def test_neither_neighbours_nor_workers_nor_cuts_change_what_a_seed_draws(
    model: Path, pair: Cluster
) -> None:
    generator = random.Random(5)
    asks = make_asks(SEEDS, generator)
    async with pair.stub() as stub:
        alone = tokens(await run(pair, stub, asks, at_once=1))
        await assert_all_free(pair, stub, within_s=5)
    assert len({tuple(output) for output in alone}) == len(asks)
    others = make_asks(range(100, 110), generator)
    repeated = [*asks, *asks, *asks, *others]
    generator.shuffle(repeated)
    expected = dict(zip(asks, alone, strict=True))
    for flags, pairs in (
        (("--prefill", "2", "--decode", "2", "--block-tokens", "5", "--chunk-tokens", "13"), 4),
        (("--both", "1", "--block-tokens", "64", "--chunk-tokens", "100"), 1),
    ):
        with baton_up(model, "--dtype", "float32", *flags) as cluster:
            async with cluster.stub() as stub:
                answers = await run(cluster, stub, repeated, at_once=48)
                await assert_all_free(cluster, stub, within_s=5)
        for ask, answer in zip(repeated, answers, strict=True):
            assert ask not in expected or answer.token_ids == expected[ask], (flags, ask)
        assert len({served_by(answer) for answer in answers}) == pairs


def served_by(answer: Answer) -> tuple[str, str]:
    assert answer.last is not None
    return answer.last.trace.prefill_worker, answer.last.trace.decode_worker


async def test_another_seed_draws_other_tokens(pair: Cluster) -> None:
    """Seeds that differ in any of their bits, after one and the same prompt."""
    seeds = [0, *(1 << bit for bit in range(64)), 2**64 - 1]
    prompt = make_prompt(random.Random(6))
    async with pair.stub() as stub:
        outputs = tokens(await run(pair, stub, [Ask(prompt, Draw(1.0), seed) for seed in seeds], AT_ONCE))
        greedy = tokens(await run(pair, stub, [Ask(prompt, Draw(0.0), seed) for seed in seeds], AT_ONCE))
    assert len({tuple(output) for output in outputs}) == len(seeds)
    assert len({tuple(output) for output in greedy}) == 1


async def test_a_seed_that_was_not_given_is_told_and_draws_the_same_again(pair: Cluster) -> None:
    prompt = make_prompt(random.Random(7))
    told: dict[int, list[int]] = {}
    async with pair.stub() as stub:
        for _ in range(4):
            answer = await pair.generate(stub, prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert answer.last is not None
            told[answer.last.trace.seed] = answer.token_ids
        assert len(told) == len({tuple(output) for output in told.values()}) == 4
        for seed, output in told.items():
            again = await pair.generate(stub, prompt, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert again.token_ids == output
            assert again.last is not None
            assert again.last.trace.seed == seed


async def test_both_doors_draw_the_same(pair: Cluster) -> None:
    """0.7 and 1.3 are no single-precision numbers: both doors must narrow them alike."""
    asks = make_asks(SEEDS, random.Random(8))
    async with pair.stub() as stub, pair.http() as client:
        expected = tokens(await run(pair, stub, asks, AT_ONCE))
        completions = await asyncio.gather(
            *(complete(client, list(ask.prompt), stream=ask.seed % 2 == 1, **ask.fields) for ask in asks)
        )
    assert [completion.only.token_ids for completion in completions] == expected


FILTERS = {
    "temperature": (Draw(0.6), Draw(1.0)),
    "top-k": (Draw(1.0, top_k=7), Draw(1.0)),
    "top-p": (Draw(1.0, top_p=0.7), Draw(1.0)),
    "top-k and top-p": (Draw(0.8, top_k=12, top_p=0.75), Draw(0.8, top_k=12)),
}


@pytest.mark.parametrize("draws", [300, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILTERS)
async def test_frequencies_are_those_of_the_reference(
    model: Path, pair: Cluster, name: str, draws: int
) -> None:
    """Prefill draws the first token, decode the second; each is judged against its own distribution."""
    draw, unfiltered = FILTERS[name]
    prompt = make_prompt(random.Random(9))
    first_seed = 10**6 * (1 + list(FILTERS).index(name))
    asks = [Ask(prompt, draw, first_seed + number, max_tokens=2) for number in range(draws)]
    async with pair.stub() as stub:
        outputs = tokens(await run(pair, stub, asks, AT_ONCE))
    reference = load_reference(model)
    logits = {
        first: reference_logits(reference, [*prompt, first])[-2:].numpy()
        for first in {first for first, _ in outputs}
    }
    drawn_first = [(logits[first][0], first) for first, _ in outputs]
    drawn_second = [(logits[first][1], second) for first, second in outputs]
    for drawn in (drawn_first, drawn_second):
        assert p_value(drawn, draw) > LEAST_P
        assert p_value(drawn, unfiltered) < LEAST_P, "the check would not notice a missing filter"
        assert p_value(drawn, replace(draw, temperature=draw.temperature / 4)) < LEAST_P


def p_value(drawn: Sequence[tuple[Floats, int]], draw: Draw) -> float:
    """Chi-square of how often the token of each rank was drawn; 0 for a draw that cannot be.

    The draws may be of different distributions (after different tokens): ranks are counted over all of
    them, which only makes the test more lenient. Rare ranks share one bin.
    """
    expected, observed = np.zeros(VOCAB_SIZE), np.zeros(VOCAB_SIZE)
    for logits, token in drawn:
        probabilities = draw.distribution(logits)
        if not probabilities[token]:
            return 0.0
        order = np.argsort(-logits, kind="stable")
        expected += probabilities[order]
        observed[np.flatnonzero(order == token)[0]] += 1
    rare = expected < LEAST_EXPECTED
    bins = [*zip(observed[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() >= 1:
        bins.append((observed[rare].sum(), expected[rare].sum()))
    assert len(bins) > 2
    counts, expectations = np.array(bins).T
    return float(chisquare(counts, expectations * counts.sum() / expectations.sum()).pvalue)
