"""API keys in Redis: a revocation takes effect within a second, and the last known keys outlive an outage."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from baton.base.api_keys import ApiKey, key_hash
from baton.base.errors import BatonError, ErrorKind
from baton.state.embedded import EmbeddedServer
from baton.state.key_view import KeyView
from baton.state.stores.redis_api_keys import KeyListing
from services.common.config.tls import Auth
from services.router.auth.redis_keys import RedisKeys
from services.router.auth.tenant_keys import TenantKeys
from tests.router.conftest import SiteMaker
from tests.router.http_client import http
from tests.router.tenants.clock import Clock
from tests.router.tenants.test_tenants_file import file_of, tenant
from tests.state.opened import open_state

SECRET = "the secret of a cluster"
BOUND_S = 1.0
# How long the machine itself may stand still meanwhile.
STALL_S = 3.0


def api_key(key: str, tenant: str = "acme", **fields: object) -> ApiKey:
    return ApiKey.model_validate({"sha256": key_hash(key).hex(), "tenant": tenant, **fields})


async def test_keys_come_and_go_within_a_second(site: SiteMaker, server: EmbeddedServer) -> None:
    """Keys change under a stream of requests; an outage in between changes nothing."""
    settings: dict[str, Any] = {
        "state": {"redis_url": server.url, "namespace": "ours"},
        "cluster_secret": "",
        "auth": Auth(redis_keys=True),
    }
    state = await open_state(server.url, namespace="ours")
    with pytest.raises(BatonError, match="needs a Redis and a cluster_secret"):
        async with site(prefill=0, decode=0, **settings):
            pass
    settings["cluster_secret"] = SECRET
    async with site(prefill=0, decode=0, **settings) as here, http(here) as client:
        client.headers["authorization"] = "Bearer sk-1"

        async def until_it_answers(status: int) -> float:
            began = time.monotonic()
            async with asyncio.timeout(BOUND_S + STALL_S):
                while (answer := await client.get("/v1/models")).status_code != status:
                    assert answer.status_code in (200, 401, 503)
                    await asyncio.sleep(0.02)
            return time.monotonic() - began

        await until_it_answers(401)
        await state.api_keys(SECRET).add(api_key("sk-1", id="one"))
        await until_it_answers(200)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.1)
            assert (await client.get("/v1/models")).status_code == 200
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await state.api_keys(SECRET).revoke("one")
        await until_it_answers(401)
    await state.close()


class Away:
    """A store that has answered once."""

    def __init__(self, *keys: ApiKey) -> None:
        self._answer: KeyListing | None = KeyListing("1", keys)

    async def listing(self, known_version: str = "") -> KeyListing:
        if self._answer is None:
            raise BatonError(ErrorKind.UNAVAILABLE, "away")
        answer, self._answer = self._answer, None
        return answer


def kind_of_refusal(keys: RedisKeys, key: str) -> ErrorKind | None:
    try:
        keys.authenticate(f"Bearer {key}", "http")
    except BatonError as error:
        return error.kind
    return None


async def test_known_keys_are_valid_for_as_long_as_is_stated(tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "tenants").write_text(file_of(tenant("acme", "sk-file", requests_per_minute=5)))
    file = TenantKeys(tmp_path / "tenants", clock, needs_key=False)
    keys = RedisKeys(file, max_age_s=60, clock=clock)
    view = KeyView(Away(api_key("sk-1"), api_key("sk-2", "unknown")), clock=clock)
    assert kind_of_refusal(keys, "sk-1") is ErrorKind.UNAVAILABLE
    keys.follow(view)
    assert kind_of_refusal(keys, "sk-1") is ErrorKind.UNAVAILABLE  # nothing was read yet
    for clock.now in (0.0, 60.0):
        await view.poll()
        assert kind_of_refusal(keys, "sk-1") is None
        assert kind_of_refusal(keys, "sk-2") is ErrorKind.UNAUTHENTICATED  # the file has no such tenant
        assert kind_of_refusal(keys, "sk-3") is ErrorKind.UNAUTHENTICATED
    clock.now = 60.1
    assert kind_of_refusal(keys, "sk-1") is ErrorKind.UNAVAILABLE
    assert kind_of_refusal(keys, "sk-file") is None
    assert keys.authenticate("Bearer sk-file", "http").tenant is keys.accounts["acme"]


async def test_without_a_file_tenants_are_those_of_the_keys() -> None:
    clock = Clock()
    keys = RedisKeys(None, max_age_s=60, clock=clock)
    view = KeyView(Away(api_key("sk-1"), api_key("sk-2"), api_key("sk-3", "other")), clock=clock)
    keys.follow(view)
    await view.poll()
    one, two, three = (keys.authenticate(f"Bearer sk-{n}", "http").tenant for n in (1, 2, 3))
    assert one is two
    assert [account.name for account in (one, three) if account is not None] == ["acme", "other"]
