"""Tenants over both public APIs: the same verdicts, true times to come back, nothing left reserved."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prometheus_client.parser import text_string_to_metric_families

from baton.base.errors import ErrorKind
from baton.rpc.grpc_errors import from_status
from services.common.config.tls import Auth
from services.router.auth.tenant_keys import TenantKeys
from services.router.placement.prefix_affinity import PromptBlocks
from services.router.tenants.account import TenantAccount
from tests.router.conftest import Site, SiteMaker, ids_request, until
from tests.router.http_client import complete, http
from tests.router.tenants.test_tenants_file import file_of, tenant


def auth(folder: Path, *entries: str) -> Auth:
    (folder / "tenants").write_text(file_of(*entries, tenant("operator", "sk-operator")))
    return Auth(tenants_file=folder / "tenants")


def account(here: Site, name: str) -> TenantAccount:
    keys = here.router.keys
    assert isinstance(keys, TenantKeys)
    return keys.accounts[name]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values of the tenants' metrics, by the rest of the name and the tenant."""
    return {
        (one.name.removeprefix("baton_router_"), one.labels["tenant"]): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if "tenant" in one.labels
    }


async def generate(here: Site, key: str, tokens: int = 3, **fields: Any) -> int:
    """Completes a prompt and returns the number of tokens."""
    call = here.stub.Generate(ids_request([1, 2], tokens, **fields), metadata=tuple(bearer(key).items()))
    return sum([len(answer.token_ids) async for answer in call])


async def refusal(here: Site, key: str, **fields: Any) -> tuple[ErrorKind, float]:
    """The kind of the error, and the seconds after which to come back."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(here, key, **fields)
    error = refused.value
    trailing: Any = error.trailing_metadata()
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    retry = error_details_pb2.RetryInfo()
    delays = [retry.retry_delay.ToNanoseconds() / 1e9 for one in status.details if one.Unpack(retry)]
    return from_status(error.code(), error.details(), trailing).kind, max(delays, default=0.0)


async def test_both_apis_share_a_tenants_limits(site: SiteMaker, tmp_path: Path) -> None:
    limited = tenant("acme", "sk-1", "sk-2", requests_per_minute=2)
    async with site(auth=auth(tmp_path, limited, tenant("other", "sk-3"))) as here, http(here) as client:
        assert (await complete(client, max_tokens=3)).status_code == 401
        client.headers.update(bearer("sk-1"))
        assert (await complete(client, max_tokens=3)).status_code == 200
        assert await generate(here, "sk-2") == 3
        refused = await complete(client, max_tokens=3)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["code"]) == (
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
        )
        assert error["message"] == "the tenant acme has reached its limit requests_per_minute = 2"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        kind, retry_s = await refusal(here, "sk-1")
        assert kind is ErrorKind.RATE_LIMITED
        assert 0 < retry_s <= 30
        assert (await client.get("/v1/models")).status_code == 200  # generates nothing
        assert await generate(here, "sk-3") == 3
        client.headers.update(bearer("sk-operator"))
        seen = samples((await client.get("/metrics")).text)
        assert seen["tenant_calls_total", "acme"] == 2
        assert seen["tenant_calls_total", "other"] == 1
        assert seen["tenant_refused_total", "acme"] == 2
        assert seen["tenant_output_tokens_total", "acme"] == 6
        assert seen["tenant_prompt_tokens_total", "acme"] == 5
        assert seen["tenant_running_requests", "acme"] == 0


async def test_concurrent_requests_end_with_their_clients(site: SiteMaker, tmp_path: Path) -> None:
    """Ended, cancelled and failed calls alike leave nothing reserved."""
    limits = {"concurrent_requests": 1, "output_tokens_per_minute": 200}
    async with site(auth=auth(tmp_path, tenant("acme", "sk-1", **limits))) as here, http(here) as client:
        client.headers.update(bearer("sk-1"))
        one = account(here, "acme")
        here.worker("decode-0").behaviour.step_s = 0.05
        call = here.stub.Generate(ids_request([1], 150), metadata=tuple(bearer("sk-1").items()))
        await call.read()
        assert one.running == 1
        busy = await complete(client, max_tokens=3)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        assert (await refusal(here, "sk-1"))[0] is ErrorKind.RATE_LIMITED
        call.cancel()
        await until(lambda: one.running == 0)

        streamed = asyncio.create_task(complete(client, max_tokens=100))
        await until(lambda: one.running == 1)
        streamed.cancel()
        await until(lambda: one.running == 0)

        here.worker("decode-0").behaviour.step_s = 0.0
        two = await complete(client, max_tokens=3, n=2)
        assert (two.status_code, two.json()["error"]["type"]) == (400, "invalid_request_error")
        assert (await refusal(here, "sk-1", n=2))[0] is ErrorKind.INVALID
        # Most of the 250 tokens that were reserved have been given back.
        assert await generate(here, "sk-1", tokens=100) == 100
        assert one.running == 0
        await here.quiet()


async def test_a_request_that_is_invalid_takes_nothing(site: SiteMaker, tmp_path: Path) -> None:
    limited = tenant("acme", "sk-1", requests_per_minute=1)
    async with site(auth=auth(tmp_path, limited)) as here, http(here) as client:
        client.headers.update(bearer("sk-1"))
        assert (await complete(client, max_tokens=-1)).status_code == 400
        assert (await refusal(here, "sk-1", temperature=-1.0))[0] is ErrorKind.INVALID
        assert await generate(here, "sk-1") == 3
        assert (await complete(client, max_tokens=-1)).status_code == 429


async def test_workers_learn_whose_blocks_a_prompt_may_reuse(site: SiteMaker, tmp_path: Path) -> None:
    """Workers seed block hashes with the tenant's name, and the router's view of their caches does so too."""
    entries = (tenant("a", "sk-a"), tenant("b", "sk-b"))
    async with site(prefill=2, auth=auth(tmp_path, *entries)) as here, http(here) as client:
        assert await generate(here, "sk-a") == 3
        client.headers.update(bearer("sk-b"))
        assert (await complete(client, max_tokens=3)).status_code == 200
        assert (await complete(client, max_tokens=0, echo=True, logprobs=1)).status_code == 200
        await here.quiet()
        prefills = [one for n in (0, 1) for one in here.worker(f"prefill-{n}").prefill.requests]
        assert sorted(one.tenant for one in prefills) == ["a", "b", "b"]
        assert [one.tenant for one in here.worker("decode-0").decode.reserves] == ["a", "b"]


async def test_the_view_of_caches_is_by_tenant(
    site: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(auth=auth(tmp_path, tenant("a", "sk-a"), tenant("b", "sk-b"))) as here:
        prefixes, asked = here.router.prefixes, []
        hash_prompt = prefixes.hash_prompt

        async def recorded(token_ids: Any, tenant: str = "") -> PromptBlocks:
            asked.append(tenant)
            return await hash_prompt(token_ids, tenant)

        monkeypatch.setattr(prefixes, "hash_prompt", recorded)
        for key in ("sk-a", "sk-b"):
            await generate(here, key)
        assert asked == ["a", "b"]


def test_auth_has_one_source() -> None:
    for wrong in (
        {},
        {"api_keys_file": "keys", "tenants_file": "tenants"},
        {"api_keys_file": "keys", "redis_keys": True},
    ):
        with pytest.raises(ValueError, match="one of api_keys_file and tenants_file"):
            Auth.model_validate(wrong)
    Auth(tenants_file=Path("tenants"), redis_keys=True)
