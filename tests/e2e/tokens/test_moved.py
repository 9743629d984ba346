"""More is promised than the KV cache holds: sequences are set aside or given back and go on, and no client
sees it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.types_pb2 import Grammar
from baton.v1.worker_pb2 import IntegrityReport
from tests.e2e.support.cluster import MODEL, Answer, Cluster, assert_all_free, baton_up
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.reference import greedy_matches, load_reference

REQUESTS, TOKENS = 8, 70
FLAGS = ("--dtype", "float64", "--slots", str(REQUESTS), "--block-tokens", "4", "--chunk-tokens", "16")
# Four tokens of output are provided for, and the cache holds two whole sequences.
SHORT = ("--kv-blocks", "44")
CONFIG = "engine: {{host_kv_mb: {}}}\n"
FIXED = {"engine.reserve_output_tokens": 4}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
DRAWN: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "ignore_eos": True,
}
# In every output with this grammar each token is one to four characters, so that all end by length.
GUIDED: dict[str, Any] = {"temperature": 0.9, "grammar": Grammar(regex="[a-z ]{400}")}


# Two blocks that all prompts begin with: where prefill is another worker, decode's slots share them.
BEGIN = [3, 1, 4, 1, 5, 9, 2, 6]


def prompt(number: int) -> list[int]:
    return BEGIN + [(5 * token + 17 * number) % VOCAB_SIZE for token in range(1 + number)]


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    """The answers that each request must have, wherever it runs: drawn where there is room for all."""
    return [answer.token_ids for answer in asyncio.run(answers_of(cluster))]


async def answers_of(cluster: Cluster) -> list[Answer]:
    """All at once, half of them drawn, with penalties or guided; everything is free afterwards."""
    async with cluster.stub() as stub:
        await cluster.generate(stub, [*BEGIN, 7], max_tokens=2, **GREEDY)
        answers = await asyncio.gather(
            *(
                cluster.generate(
                    stub,
                    prompt(number),
                    max_tokens=TOKENS - number,
                    seed=number,
                    **(GREEDY, DRAWN, GREEDY, GUIDED)[number % 4],
                )
                for number in range(REQUESTS)
            )
        )
        await assert_all_free(cluster, 1.0)
    return answers


async def leave_early(cluster: Cluster) -> None:
    """Clients that go after a few tokens each; nothing of theirs is left, set aside or not."""
    async with cluster.stub() as stub:

        async def one(number: int) -> None:
            request = GenerateRequest(
                model=MODEL, token_ids=TokenIds(ids=prompt(number % REQUESTS)), max_tokens=TOKENS, **GREEDY
            )
            call = stub.Generate(request, timeout=60)
            received = 0
            async for message in call:
                received += len(message.token_ids)
                if received > 3 * number:
                    call.cancel()
                    return

        await asyncio.gather(*(one(number) for number in range(3 * REQUESTS)))
        await assert_all_free(cluster, 1.0)


async def report_of(cluster: Cluster) -> IntegrityReport:
    """The integrity report of the worker that decodes."""
    (report,) = [report for name, report in (await cluster.reports()).items() if "prefill" not in name]
    return report


PAIR, BOTH = ("--prefill", "1", "--decode", "1"), ("--both", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "host_kv_mb"),
    [
        pytest.param(PAIR, 0, id="1+1-moved"),
        pytest.param(PAIR, 16, id="1+1-paused"),
        pytest.param(BOTH, 0, id="both-moved"),
        pytest.param(BOTH, 16, id="both-paused"),
    ],
)
async def test_every_stream_is_whole_and_exact(
    model: Path, expected: list[list[int]], workers: tuple[str, ...], host_kv_mb: int
) -> None:
    config = CONFIG.format(host_kv_mb)
    with baton_up(model, *FLAGS, *SHORT, *workers, config=config, fixed=FIXED) as short:
        answers = await answers_of(short)
        report = await report_of(short)
        await leave_early(short)
    assert [answer.token_ids for answer in answers] == expected
    assert [len(answer.token_ids) for answer in answers] == [TOKENS - number for number in range(REQUESTS)]
    for number in range(3, REQUESTS, 4):
        assert re.fullmatch("[a-z ]+", answers[number].text)
    reference = load_reference(model)
    for number in range(0, REQUESTS, 2):
        greedy_matches(reference, prompt(number), answers[number].token_ids)
    assert report.block_grants > 0
    # How many depends on who was reserved before whom had committed, and on what was evicted meanwhile.
    assert (report.blocks_resident > 0) == ("--decode" in workers)
    # 16 MB of the host hold all that these slots ever do.
    assert (report.sequences_preempted > 0, report.sequences_swapped_out > 0) == (
        host_kv_mb == 0,
        host_kv_mb > 0,
    )
    attempts = [answer.last.trace.attempts for answer in answers if answer.last is not None]
    assert sum(attempts) >= REQUESTS + report.sequences_preempted, "a refusal may cost one too"
