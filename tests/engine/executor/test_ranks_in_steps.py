"""Requests with every feature get the same answers from a worker of several devices."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import pytest

from baton.engine.shared_memory.logprob_records import Logprobs
from tests.engine.local_engine import LocalEngine, Start
from tests.support.sampling.random_sampling import FEATURES, random_features, random_limits, random_params

VOCAB, MOST = 97, 10
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 4}


def starts(count: int, most: int = MOST) -> list[Start]:
    """Each feature alone, all together, none, and random ones; `most`: tokens of an output."""
    rng, made = random.Random(count), []
    chosen = [frozenset([feature]) for feature in FEATURES] + [frozenset(FEATURES), frozenset()]
    chosen += [random_features(rng) for _ in range(count - len(chosen))]
    for features in chosen[:count]:
        limits = random_limits(rng, features, VOCAB, most)
        prompt = tuple(rng.choices(range(VOCAB), k=rng.randint(1, 30)))
        sampling = random_params(rng, features, VOCAB)
        made.append(Start(prompt, most, sampling, limits.stop_token_ids, limits.min_tokens))
    return made


@pytest.mark.parametrize("count", [16, pytest.param(500, marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_the_devices(tmp_path: Path, count: int) -> None:
    requests = starts(count)
    (outputs, logprobs), *others = [answers(tmp_path, requests, ranks) for ranks in (1, 2, 4)]
    assert any(one is not None for each in logprobs for one in each)
    for found, their_logprobs in others:
        assert found == outputs
        for mine, theirs in zip(chain(*logprobs), chain(*their_logprobs), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert theirs.logprob == pytest.approx(mine.logprob, abs=1e-6)
                assert [token for token, _ in theirs.top] == [token for token, _ in mine.top]


def answers(
    folder: Path, requests: list[Start], ranks: int
) -> tuple[list[list[int]], list[list[Logprobs | None]]]:
    """Tokens and logprobs, of as many requests at once as there are slots."""
    engine = LocalEngine(
        folder / str(ranks), dtype="float64", slots=8, blocks=200, changes=SHAPE, ranks=ranks
    )
    outputs, logprobs = [], []
    for first in range(0, len(requests), 8):
        keys = engine.start_many(requests[first : first + 8])
        outputs += engine.run(*keys)
        logprobs += [engine.logprobs[key] for key in keys]
        for key in keys:
            engine.slots.release(*key)
            engine.pools.release(engine.tables[key])
    return outputs, logprobs
