"""`--transport nccl`: a cluster's tokens over the double of NCCL, and a worker whose NCCL hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free, baton_up, eventually, serves_again
from tests.e2e.support.fake_nccl import HANGS
from tests.e2e.support.own_engine import program
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.reference import greedy_matches, load_reference

LENGTHS = (1, 47, 300)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# So many that the worker is known to be unfit long before the last.
TOKENS = 1500
PROMPT = list(range(3, 60))


@pytest.fixture
def cluster(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv(HANGS, str(tmp_path))
    own = program("tests.e2e.support.fake_nccl")
    with baton_up(model, "--transport", "nccl", "--dtype", "float64", program=own) as running:
        yield running


@pytest.mark.slow
async def test_the_same_tokens_by_nccl_and_a_new_worker_where_it_hangs(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    """Decode's NCCL hangs: the worker takes nothing new, brings running requests to their end, and ends with
    a code of its own; its supervisor starts it again, and links by NCCL are there again."""
    reference = load_reference(model)
    prompts = [[(7 * at + 13 * length) % VOCAB_SIZE for at in range(length)] for length in LENGTHS]
    async with cluster.stub() as stub:
        answers = await asyncio.gather(
            *(cluster.generate(stub, prompt, max_tokens=12, **GREEDY) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            greedy_matches(reference, prompt, answer.token_ids)
        await assert_all_free(cluster, 5.0)
        before = await cluster.reports()
        assert [link.transport for report in before.values() for link in report.links] == ["nccl", "nccl"]

        request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=PROMPT), max_tokens=TOKENS, **GREEDY)
        hung = tmp_path / str(before["decode-0"].engine_pid)
        tokens: list[int] = []
        unfit_at = 0
        async for message in stub.Generate(request, timeout=60):
            tokens += message.token_ids
            if len(tokens) > 20:  # decode's own: the link has carried it all
                hung.touch()
            if not unfit_at and "engine_restart_needed" in cluster.log.read_text():
                unfit_at = len(tokens)
        assert 0 < unfit_at < TOKENS, "it was not running any more"
        assert len(tokens) == TOKENS
        greedy_matches(reference, PROMPT, tokens[:50])

        await eventually(lambda: "exited with code 3: NCCL did not end" in cluster.log.read_text(), 20)
        await serves_again(cluster, stub, PROMPT, 60)
        await assert_all_free(cluster, 5.0)
        after = await cluster.reports()
        assert after["decode-0"].engine_pid != before["decode-0"].engine_pid
        assert after["decode-0"].handoffs_committed == 1
        assert {link.transport for report in after.values() for link in report.links} == {"nccl"}
