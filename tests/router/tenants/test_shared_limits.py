"""Two routers with one Redis: a tenant has its limits once."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

from baton.state.embedded import EmbeddedServer
from services.common.config.state import StateConfig
from services.common.config.tls import Auth
from tests.router.conftest import MODEL, Site, SiteMaker
from tests.router.http_client import http


async def _served(site: Site, calls: int) -> int:
    """The number of the calls that were admitted; each other one says when to come back."""
    served = 0
    body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 2}
    async with http(site) as client:
        for _ in range(calls):
            answer = await client.post("/v1/completions", json=body, headers={"authorization": "Bearer key"})
            assert answer.status_code in (200, 429)
            assert answer.status_code == 200 or answer.headers["retry-after"]
            served += answer.status_code == 200
    return served


async def test_two_routers_share_a_limit(site: SiteMaker, tmp_path: Path) -> None:
    """Also with a router that was started again."""
    hashed = hashlib.sha256(b"key").hexdigest()
    limits = "limits: {requests_per_minute: 12}"
    (tmp_path / "tenants").write_text(f"tenants: [{{name: acme, keys_sha256: ['{hashed}'], {limits}}}]\n")
    auth = Auth(tenants_file=tmp_path / "tenants")
    server = await EmbeddedServer.start()
    try:
        state = StateConfig(redis_url=server.url, namespace="shared")
        began = time.monotonic()

        def most() -> float:
            """The limit and a tenth, and what has been refilled since: 12 a minute."""
            return 12 * 1.1 + (time.monotonic() - began) / 5

        async with site(auth=auth, state=state) as one, site(auth=auth, state=state) as other:
            admitted = 0
            # Each holds a part; what the other does not use arrives with rebalances, twice a second.
            while admitted < 10 and time.monotonic() - began < 30:
                admitted += await _served(one, 14) + await _served(other, 14)
                assert admitted <= most()
                await asyncio.sleep(0.2)
            assert admitted >= 10
        async with site(auth=auth, state=state) as again:
            assert admitted + await _served(again, 14) <= most()
    finally:
        await server.stop()
