"""No prompt of one tenant is answered from another tenant's cache: evidence by counts, not by timing.

Eight tenants send the same prompts at the same time to workers with room for everything. What each request
finds cached must be what its own tenant's earlier requests have left there, on prefill and decode workers.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.support.cluster import MODEL, assert_all_free, baton_up
from tests.support.checkpoints import FAMILIES, VOCAB_SIZE
from tests.support.shared_prompts import MOST_BLOCKS, OwnCache, prompts

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

REQUESTS, TENANTS, BLOCK = 10_000, 8, 5
FLAGS = ("--prefill", "1", "--decode", "1", "--block-tokens", str(BLOCK), "--slots", "16")


@dataclass
class Counts:
    """Counts over all tenants. `hits`: blocks that their own requests had left; `exposed`: requests of which
    another tenant had left more."""

    requests: int = 0
    hits: int = 0
    exposed: int = 0


def tenants_file(folder: Path, names: list[str]) -> Path:
    """The key of a tenant is its name."""
    path = folder / "tenants.yaml"
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    path.write_text(
        "tenants:\n" + "".join(f'- {{name: {name}, keys_sha256: ["{hashes[name]}"]}}\n' for name in names)
    )
    return path


async def send(stub: RouterServiceAsyncStub, tenant: str, token_ids: list[int]) -> int:
    """One request to its end; how many prompt tokens were cached."""
    request = GenerateRequest(
        model=MODEL, token_ids=TokenIds(ids=token_ids), max_tokens=2, temperature=0, ignore_eos=True
    )
    metadata = (("authorization", f"Bearer {tenant}"),)
    async for message in stub.Generate(request, metadata=metadata, timeout=120):
        last = message
    assert last.usage.completion_tokens == 2
    return last.usage.cached_tokens


async def one_tenant(
    stub: RouterServiceAsyncStub, tenant: str, caches: dict[str, OwnCache], count: int, counts: Counts
) -> None:
    """A tenant's requests, one after another, so that what it has left is known."""
    own = caches[tenant]
    for prompt in prompts(int(tenant[-1]), count, BLOCK, VOCAB_SIZE):
        predicted = own.held(prompt)
        counts.exposed += any(other.held(prompt) > predicted for other in caches.values())
        found = await send(stub, tenant, prompt.token_ids)
        assert found == predicted * BLOCK, f"request {counts.requests} of {tenant}: {found} tokens cached"
        counts.requests += 1
        counts.hits += predicted
        own.add(prompt)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_ten_thousand_requests_of_eight_tenants_find_only_their_own(tmp_path: Path) -> None:
    names = [f"tenant-{number}" for number in range(TENANTS)]
    each = REQUESTS // TENANTS
    FAMILIES[0].make(tmp_path, seed=11)
    blocks = TENANTS * MOST_BLOCKS * (each // 5 + 8) + 200
    config = f"auth: {{tenants_file: {tenants_file(tmp_path, names)}}}\nengine: {{kv_blocks: {blocks}}}\n"
    caches, counts = {name: OwnCache() for name in names}, Counts()
    with baton_up(tmp_path, *FLAGS, config=config) as cluster:
        async with cluster.stub() as stub:
            await asyncio.gather(*(one_tenant(stub, name, caches, each, counts) for name in names))
        await assert_all_free(cluster, within_s=5)
        reports = await cluster.reports()
    prefill, decode = (reports[name].prefixes for name in ("prefill-0", "decode-0"))
    print(counts, prefill, decode)
    assert counts.requests == REQUESTS
    assert counts.exposed >= REQUESTS / 10, "another tenant's blocks would have been found"
    assert prefill.evicted_blocks == decode.evicted_blocks == 0
    assert prefill.hit_tokens == counts.hits * BLOCK
    assert prefill.device_hits == decode.device_hits == counts.hits
