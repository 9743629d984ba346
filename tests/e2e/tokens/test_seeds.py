"""A seed decides a request's tokens, whatever else runs and wherever; and what is drawn is drawn fairly."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from baton.client import AsyncClient
from tests.e2e.support.cluster import Answer, Cluster, assert_all_free, baton_up
from tests.e2e.support.completions import complete
from tests.e2e.tokens.sampled_asks import Ask as SampledAsk
from tests.support.checkpoints import FAMILIES, MIXTURES, VOCAB_SIZE, Case
from tests.support.reference import load_reference, raw_logits
from tests.support.sampling.naive_sampler import naive_distribution, naive_edited

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

Floats = npt.NDArray[np.float64]

SEEDS = (0, 1, 2**32, 2**63, 2**64 - 1)
AT_ONCE = 32
WIDE, NARROW = (
    ("--block-tokens", block, "--chunk-tokens", chunk) for block, chunk in (("64", "100"), ("5", "13"))
)
MAX_TOKENS = 24
AT_A_TIME = 120
LEAST_P = 1e-3
LEAST_EXPECTED = 8.0
# That the means of what is drawn would have by another distribution, where a prompt tells the two apart.
CLEARLY = 1e-6
PROMPTS_TRIED = 200


@dataclass(frozen=True)
class Draw:
    """The sampling parameters of a request."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def fields(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


MIXES = (
    Draw(1.0),
    Draw(0.7, top_k=8),
    Draw(1.3, top_p=0.8),
    Draw(0.9, top_k=20, top_p=0.5),
    Draw(2.5, top_k=VOCAB_SIZE),
)


@dataclass(frozen=True)
class Ask:
    """One seeded request and its draw."""

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


async def run(
    cluster: Cluster, stub: RouterServiceAsyncStub, asks: Sequence[Ask], at_once: int
) -> list[Answer]:
    """Sends the requests and returns the answers in order."""
    turn = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> Answer:
        async with turn:
            return await cluster.generate(stub, ask.prompt, **ask.fields)

    return await asyncio.gather(*map(one, asks))


def tokens(answers: Iterable[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.slow
async def test_neither_neighbours_nor_workers_nor_cuts_change_what_a_seed_draws(model: Path) -> None:
    """Each request by itself, then among many; there, and where blocks and chunks are cut otherwise and some
    sequences are handed over."""
    generator = random.Random(5)
    asks = make_asks(SEEDS, generator)
    others = make_asks(range(100, 104), generator)
    repeated = [*asks, *asks, *others]
    generator.shuffle(repeated)
    expected: dict[Ask, list[int]] = {}
    for flags, pairs in (
        (("--both", "1", *WIDE), 1),
        (("--prefill", "1", "--decode", "1", "--both", "1", *NARROW), 2),
    ):
        with baton_up(model, "--dtype", "float32", *flags) as cluster:
            async with cluster.stub() as stub:
                if not expected:
                    alone = tokens(await run(cluster, stub, asks, at_once=1))
                    expected = dict(zip(asks, alone, strict=True))
                answers = await run(cluster, stub, repeated, at_once=48)
                await assert_all_free(cluster, within_s=5)
        for ask, answer in zip(repeated, answers, strict=True):
            assert ask not in expected or answer.token_ids == expected[ask], (flags, ask)
        assert len({served_by(answer) for answer in answers}) == pairs
    assert len({tuple(output) for output in expected.values()}) == len(asks)


def served_by(answer: Answer) -> tuple[str, str]:
    assert answer.last is not None
    return answer.last.trace.prefill_worker, answer.last.trace.decode_worker


async def test_another_seed_draws_other_tokens(cluster: Cluster) -> None:
    """Seeds that differ in any of their bits, after one and the same prompt."""
    seeds = [0, *(1 << bit for bit in range(64)), 2**64 - 1]
    prompt = make_prompt(random.Random(6))
    async with cluster.stub() as stub:
        outputs, greedy = [
            tokens(await run(cluster, stub, [Ask(prompt, draw, seed, 8) for seed in some], AT_ONCE))
            for draw, some in ((Draw(1.0), seeds), (Draw(0.0), seeds[::13]))
        ]
    assert len({tuple(output) for output in outputs}) == len(seeds)
    assert len({tuple(output) for output in greedy}) == 1


async def test_a_seed_that_was_not_given_is_reported_and_draws_the_same_again(cluster: Cluster) -> None:
    prompt = make_prompt(random.Random(7))
    reported: dict[int, list[int]] = {}
    async with cluster.stub() as stub:
        fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
        for answer in await asyncio.gather(*(cluster.generate(stub, prompt, **fields) for _ in range(4))):
            assert answer.last is not None
            reported[answer.last.trace.seed] = answer.token_ids
        assert len(reported) == len({tuple(output) for output in reported.values()}) == 4
        for seed, output in reported.items():
            again = await cluster.generate(stub, prompt, seed=seed, **fields)
            assert again.token_ids == output
            assert again.last is not None
            assert again.last.trace.seed == seed


@pytest.mark.parametrize(
    "seeds_apart", [(0, 2), pytest.param(range(len(SEEDS)), marks=pytest.mark.slow)], ids=["twice", "all"]
)
async def test_both_apis_draw_the_same(cluster: Cluster, seeds_apart: Sequence[int]) -> None:
    """0.7 and 1.3 are no single-precision numbers: both APIs must narrow them alike.

    Each way to draw comes with some of the seeds, and each seed as often: what narrows the one does not see
    the other.
    """
    every = make_asks(SEEDS, random.Random(8))
    asks = [
        every[len(SEEDS) * way + (way + off) % len(SEEDS)] for way in range(len(MIXES)) for off in seeds_apart
    ]
    assert Counter(ask.seed for ask in asks) == dict.fromkeys(SEEDS, len(seeds_apart))
    async with cluster.stub() as stub, cluster.http() as client:
        expected = tokens(await run(cluster, stub, asks, AT_ONCE))
        completions = await asyncio.gather(
            *(complete(client, list(ask.prompt), stream=ask.seed % 2 == 1, **ask.fields) for ask in asks)
        )
    assert [completion.only.token_ids for completion in completions] == expected


ENDS = {"max_tokens": 2, "ignore_eos": True, "seed": 10**6}
HELD = tuple(range(1, 8))
# Groups of fields; without any one of them other tokens would be drawn.
DRAWS: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 0.6}],
    "top-k": [{"top_k": 7}],
    "top-p": [{"top_p": 0.7}],
    "min-p": [{"temperature": 1.5}, {"min_p": 0.2}],
    "top-n-sigma": [{"temperature": 1.5}, {"top_n_sigma": 0.9}],
    "top-k and top-p": [{"temperature": 0.6}, {"top_k": 12}, {"top_p": 0.75}],
    "repetition": [{"temperature": 0.7}, {"repetition_penalty": 0.6}],
    "presence and frequency": [
        {"temperature": 2.0, "logit_bias": dict.fromkeys(range(100, 104), 20.0)},
        {"presence_penalty": -2.0},
        {"frequency_penalty": -1.5},
    ],
    "everything": [
        {"temperature": 1.3},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.08},
        {"repetition_penalty": 1.6, "presence_penalty": -2.0, "frequency_penalty": -1.75},
        {"logit_bias": {**dict.fromkeys(range(0, VOCAB_SIZE, 3), 2.0), **dict.fromkeys(HELD, 5.0)}},
        {"stop_token_ids": HELD, "min_tokens": 2},
    ],
}
# Count the output before, and the first token has none.
OF_THE_OUTPUT = {"presence_penalty", "frequency_penalty"}


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("everything", 240),
        *(pytest.param(name, 3000, marks=pytest.mark.slow) for name in DRAWS),
    ],
)
async def test_frequencies_are_those_of_the_reference(
    model: Path, cluster: Cluster, name: str, draws: int
) -> None:
    """Prefill draws the first token, decode the second; each is judged against its own distribution, and
    against those that leave something out, which the judge must notice."""
    reference = load_reference(model)
    ends = {**ENDS, "seed": 10**6 * (1 + list(DRAWS).index(name))}
    ask, others = telling_asks(reference, ends, DRAWS[name], draws)
    outputs = await draw_pairs(cluster, ask, draws)
    raw = {first: raw_logits(reference, [*ask.prompt, first])[-2:] for first, _ in set(outputs)}
    for number in (0, 1):
        drawn = [(raw[output[0]][number], output[:number], output[number]) for output in outputs]
        assert p_value(ask, drawn) > LEAST_P
        for group, other in zip(DRAWS[name], others, strict=True):
            if number == 1 or not set(group) <= OF_THE_OUTPUT:
                assert p_value(other, drawn) < LEAST_P, (number, group)


@pytest.mark.parametrize("case", [FAMILIES[0], *MIXTURES[:3:2]], ids=str)
def test_each_model_has_a_prompt_that_tells_draws_apart(case: Case, tmp_path: Path) -> None:
    """The first prompt of a mixture often does not: no token of it is among those that may be drawn, so that
    penalties change nothing."""
    draws = DRAWS["everything"]
    ask, others = telling_asks(load_reference(case.make(tmp_path, seed=3)), ENDS, draws, 240)
    assert len(others) == len(draws)
    assert all(other.prompt == ask.prompt for other in others)


def telling_asks(
    reference: Any, ends: dict[str, Any], draws: list[dict[str, Any]], count: int
) -> tuple[SampledAsk, list[SampledAsk]]:
    """A request, and the same without each group of fields, after a prompt that tells them apart in `count`
    draws: whether it does depends on the model."""
    for seed in range(9, 9 + PROMPTS_TRIED):
        prompt = tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=24))
        ask = SampledAsk(prompt, merged(ends, *draws))
        others = [
            SampledAsk(prompt, merged(ends, *(each for each in draws if each is not group)))
            for group in draws
        ]
        likeliest = int(distribution(ask, raw_logits(reference, prompt)[-1], ()).argmax())
        raw = raw_logits(reference, [*prompt, likeliest])[-2:]
        if all(
            tells(ask, other, raw[number], (likeliest,)[:number], count)
            for group, other in zip(draws, others, strict=True)
            for number in (0, 1)
            if number == 1 or not set(group) <= OF_THE_OUTPUT
        ):
            return ask, others
    raise AssertionError(f"none of {PROMPTS_TRIED} prompts tells these draws apart")


def tells(ask: SampledAsk, other: SampledAsk, raw: list[float], before: tuple[int, ...], count: int) -> bool:
    """True if `count` draws of `ask` are clearly none of `other`."""
    mine, theirs = (distribution(each, raw, before) for each in (ask, other))
    if count * mine[theirs == 0].sum() > LEAST_EXPECTED:
        return True
    order = np.argsort(-theirs, kind="stable")
    bins = binned(count * mine[order], count * theirs[order])
    return len(bins) > 2 and chi_square(bins) < CLEARLY


def merged(*groups: dict[str, Any]) -> dict[str, Any]:
    return {field: value for group in groups for field, value in group.items()}


async def draw_pairs(cluster: Cluster, ask: SampledAsk, draws: int) -> list[tuple[int, ...]]:
    """Draws outputs of two tokens for `draws` seeds from the request's own on, each a choice of some
    request."""
    turn = asyncio.Semaphore(4)
    async with await AsyncClient.connect(cluster.grpc_address) as client:

        async def some(start: int) -> list[tuple[int, ...]]:
            fields = {**ask.fields, "n": AT_A_TIME, "seed": ask.fields["seed"] + start}
            async with turn:
                whole = await client.complete(ask.prompt, **fields)
            return [choice.tokens for choice in whole.choices]

        parts = await asyncio.gather(*(some(start) for start in range(0, draws, AT_A_TIME)))
    return [output for part in parts for output in part]


def p_value(ask: SampledAsk, drawn: Sequence[tuple[list[float], tuple[int, ...], int]]) -> float:
    """Chi-square of how often the token of each rank was drawn; 0 for a draw that cannot be.

    Each draw is given by the raw logits, the output before it, and the token. They may be of different
    distributions (after different tokens): ranks are counted over all of them, which only makes the test more
    lenient. Rare ranks share one bin.
    """
    expected, observed = np.zeros(VOCAB_SIZE), np.zeros(VOCAB_SIZE)
    known: dict[tuple[int, ...], Floats] = {}
    for raw, before, token in drawn:
        if before not in known:
            known[before] = distribution(ask, raw, before)
        probabilities = known[before]
        if not probabilities[token]:
            return 0.0
        order = np.argsort(-probabilities, kind="stable")
        expected += probabilities[order]
        observed[np.flatnonzero(order == token)[0]] += 1
    bins = binned(observed, expected)
    assert len(bins) > 2
    return chi_square(bins)


def binned(observed: Floats, expected: Floats) -> list[tuple[float, float]]:
    """(observed, expected) of each rank, of rare ones together."""
    rare = expected < LEAST_EXPECTED
    bins = [*zip(observed[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() >= 1:
        bins.append((observed[rare].sum(), expected[rare].sum()))
    return bins


def chi_square(bins: list[tuple[float, float]]) -> float:
    counts, expectations = np.array(bins).T
    return float(chisquare(counts, expectations * counts.sum() / expectations.sum()).pvalue)


def distribution(ask: SampledAsk, raw: list[float], before: tuple[int, ...]) -> Floats:
    """[vocab] probabilities of the token after `before`."""
    assert isinstance(ask.prompt, tuple)
    params = ask.params(0)
    edited = naive_edited(raw, params, ask.limits, ask.prompt, before)
    return np.array(naive_distribution([logit / params.temperature for logit in edited], params))
