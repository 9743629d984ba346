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
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.1, "seed": 2, "top_k": 40, "repetition_penalty": 1.2, "logprobs": 2},
]


@pytest.mark.parametrize(
    ("prefill", "decode"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)], ids=["2 to 1", "1 to 2"]
)
async def test_tokens_do_not_depend_on_the_devices(
    cluster: Cluster, model: Path, prefill: int, decode: int
) -> None:
    wanted = await answers_of(cluster)
    devices = ("--prefill-tensor-parallel", str(prefill), "--decode-tensor-parallel", str(decode))
    with baton_up(model, "--dtype", "float64", "--numerics", "exact", *CUT, *devices) as divided:
        found = await answers_of(divided)
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
