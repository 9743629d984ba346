"""More is promised than the KV cache holds: sequences are given back and go on, and no client sees it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Answer, Cluster, assert_all_free, baton_up
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.reference import greedy_matches, load_reference

REQUESTS, TOKENS = 8, 100
FLAGS = ("--dtype", "float64", "--slots", str(REQUESTS), "--block-tokens", "4", "--chunk-tokens", "16")
# Four tokens of output are provided for, and the cache holds two whole sequences.
SHORT = ("--kv-blocks", "64")
CONFIG = "engine: {reserve_output_tokens: 4}\n"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
DRAWN: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=9)


def prompt(number: int) -> list[int]:
    return [(5 * token + 17 * number) % VOCAB_SIZE for token in range(9 + number)]


async def answers_of(cluster: Cluster) -> list[Answer]:
    """All at once, half of them drawn with penalties; everything is free afterwards."""
    async with cluster.stub() as stub:
        answers = await asyncio.gather(
            *(
                cluster.generate(
                    stub,
                    prompt(number),
                    max_tokens=TOKENS - number,
                    seed=number,
                    **(DRAWN if number % 2 else GREEDY),
                )
                for number in range(REQUESTS)
            )
        )
        await assert_all_free(cluster, stub, 1.0)
    return answers


@pytest.mark.parametrize(
    "workers", [("--prefill", "1", "--decode", "1"), ("--both", "1")], ids=["1+1", "both"]
)
async def test_every_stream_is_whole_and_exact(model: Path, workers: tuple[str, ...]) -> None:
    with baton_up(model, *FLAGS, *workers) as roomy:
        expected = await answers_of(roomy)
    with baton_up(model, *FLAGS, *SHORT, *workers, config=CONFIG) as short:
        answers = await answers_of(short)
        async with short.stub() as stub:
            (audit,) = [audit for name, audit in (await short.audits(stub)).items() if "prefill" not in name]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [len(answer.token_ids) for answer in answers] == [TOKENS - number for number in range(REQUESTS)]
    reference = load_reference(model)
    for number in range(0, REQUESTS, 2):
        greedy_matches(reference, prompt(number), answers[number].token_ids)
    assert audit.growth_grants > 0
    assert audit.sequences_moved > 0
    attempts = [answer.last.trace.attempts for answer in answers if answer.last is not None]
    assert sum(attempts) >= REQUESTS + audit.sequences_moved, "a refusal may cost one too"
