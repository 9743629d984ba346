"""Workers of two devices hand over to workers of one, and the other way round: the tokens are those of a
cluster in which each worker has one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import CUT
from tests.e2e.support.cluster import Answer, Cluster, assert_all_free, baton_up

TOKENS = 12
# Without drafts, which one of the clusters would verify.
ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "max_draft_tokens": 0},
    {
        "temperature": 1.1,
        "seed": 2,
        "top_k": 40,
        "repetition_penalty": 1.2,
        "logprobs": 2,
        "max_draft_tokens": 0,
    },
]


async def test_a_prefill_worker_of_two_devices(cluster: Cluster, unlike: Cluster) -> None:
    await judge(cluster, unlike, prefill=2, decode=1)


@pytest.mark.slow
async def test_a_decode_worker_of_two_devices(cluster: Cluster, model: Path) -> None:
    flags = ("--dtype", "float64", "--numerics", "exact", *CUT, "--decode-tensor-parallel", "2")
    with baton_up(model, *flags) as divided:
        await judge(cluster, divided, prefill=1, decode=2)


async def judge(cluster: Cluster, divided: Cluster, prefill: int, decode: int) -> None:
    """Compares both clusters' answers. `prefill`, `decode`: devices of each role's worker in `divided`."""
    wanted, found = await answers_of(cluster), await answers_of(divided)
    reports = await divided.reports()
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    sent, received = reports["prefill-0"], reports["decode-0"]
    assert (sent.devices, received.devices) == (prefill, decode)
    assert sent.bytes_shipped == received.bytes_received == sent.blocks_shipped[0] * sent.block_bytes[0] > 0
    assert sent.block_bytes == (await cluster.reports())["prefill-0"].block_bytes


async def answers_of(cluster: Cluster) -> list[Answer]:
    """The answers to all requests, made at once; everything is free afterwards."""
    prompt = random.Random(1).choices(range(256), k=40)
    async with cluster.stub() as stub:
        answers = await asyncio.gather(
            *(
                cluster.generate(stub, prompt, max_tokens=TOKENS, ignore_eos=True, **fields)
                for fields in ASKED
            )
        )
        await assert_all_free(cluster, 1.0)
    return answers
