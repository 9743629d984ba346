"""Drafts from what a tenant was answered before change no token, and are of no other tenant's answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.api.test_tenant_isolation import tenants_file
from tests.e2e.conftest import CUT
from tests.e2e.support.cluster import MODEL, assert_all_free, baton_up

if TYPE_CHECKING:
    from baton.v1.router_pb2 import GenerateResponse
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

PROMPT, TOKENS = [2, 7, 1, 8, 2, 8, 1, 8], 64


async def ask(stub: RouterServiceAsyncStub, tenant: str) -> tuple[list[int], GenerateResponse]:
    """The tokens of a greedy answer to PROMPT, and its last message."""
    request = GenerateRequest(
        model=MODEL, token_ids=TokenIds(ids=PROMPT), max_tokens=TOKENS, temperature=0, ignore_eos=True
    )
    tokens: list[int] = []
    async for message in stub.Generate(
        request, metadata=(("authorization", f"Bearer {tenant}"),), timeout=60
    ):
        tokens += message.token_ids
    return tokens, message


@pytest.mark.slow
async def test_answers_that_a_tenant_was_given_are_its_drafts_alone(model: Path, tmp_path: Path) -> None:
    config = (
        f"auth: {{tenants_file: {tenants_file(tmp_path, ['a', 'b'])}}}\nengine: {{lookahead_table_mb: 1}}\n"
    )
    flags = ("--dtype", "float64", "--numerics", "exact", *CUT, "--speculation", "table")
    with baton_up(model, *flags, config=config) as cluster:
        async with cluster.stub() as stub:
            answers = [await ask(stub, tenant) for tenant in "aabb"]
        await assert_all_free(cluster, 1.0)
        decode = (await cluster.reports())["decode-0"]
    assert [tokens for tokens, _ in answers] == [answers[0][0]] * 4
    drafts = [last.trace.drafts for _, last in answers]
    assert [one.steps + one.accepted for one in drafts] == [TOKENS - 1] * 4
    assert [one.drafts for one in drafts[::2]] == [0, 0], "of a tenant's first answer nothing was known"
    assert all(one.accepted > TOKENS // 2 for one in drafts[1::2])
    assert decode.lookahead_cells > TOKENS
    assert [sum(source.accepted) for source in decode.drafts] == [0, 0, sum(one.accepted for one in drafts)]
