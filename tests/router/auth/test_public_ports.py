"""Public ports with API keys refuse callers without one, except probes; the client sends its key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import AsyncClient, BatonError, Client, ErrorKind
from baton.rpc.grpc_errors import from_status
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import TargetSettings
from loadgen.targets.preflight import served_model
from services.common.config.tls import Auth
from tests.router.conftest import MODEL, SiteMaker, ids_request
from tests.router.http_client import complete, http, metric

KEY = "sk-of-a-caller"
POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
GETS = ("/v1/models", f"/v1/models/{MODEL}", "/metrics", "/nothing", "/openapi.json", "/docs")


@pytest.fixture
def auth(tmp_path: Path) -> Auth:
    path = tmp_path / "api-keys"
    path.write_text(f"# ours\n{KEY}\n")
    return Auth(api_keys_file=path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def check_refusal(response: httpx.Response, message: str) -> None:
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert message in error["message"]


async def test_http(site: SiteMaker, auth: Auth) -> None:
    async with site(auth=auth) as here, http(here) as client:
        for path in ("/health", "/ready", "/version"):
            assert (await client.get(path)).status_code == 200, path
        for headers, message in (({}, "needed"), (bearer("sk-other"), "not valid")):
            for path in GETS:
                check_refusal(await client.get(path, headers=headers), message)
            for path in POSTS:
                check_refusal(await client.post(path, json={}, headers=headers), message)
        twice = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer sk-other")]
        check_refusal(await client.get("/v1/models", headers=twice), "needed")
        assert here.router.dispatcher.running == 0
        client.headers.update(bearer(KEY))
        assert (await complete(client, max_tokens=3)).json()["usage"]["completion_tokens"] == 3
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/nothing")).status_code == 404


async def test_a_large_body_without_a_key_is_not_read(site: SiteMaker, auth: Auth) -> None:
    async with site(auth=auth) as here, http(here) as client:
        check_refusal(await client.post("/v1/completions", json={"prompt": "x" * 300_000}), "needed")
        assert (await client.get("/health")).status_code == 200


async def test_grpc(site: SiteMaker, auth: Auth) -> None:
    async with site(auth=auth) as here:
        for metadata in ((), (("authorization", "Bearer sk-other"),), (("authorization", KEY),)):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                async for _ in here.stub.Generate(ids_request([1]), metadata=metadata):
                    pass
            error = refusal.value
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            trailing: Any = error.trailing_metadata()
            assert from_status(error.code(), error.details(), trailing).kind is ErrorKind.UNAUTHENTICATED
        answers = here.stub.Generate(ids_request([1], 3), metadata=(("authorization", f"Bearer {KEY}"),))
        assert sum([len(answer.token_ids) async for answer in answers]) == 3


async def test_grpc_health_is_open_and_reflection_is_not(site: SiteMaker, auth: Auth) -> None:
    async with site(auth=auth) as here, grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == serving
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == serving
        watch.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in reflection.ServerReflectionInfo(asked):
                pass
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


def completes(address: str, sampling: Any) -> int:
    """The number of tokens that the client for threads gets."""
    with Client(address, api_key=KEY) as client:
        return len(client.complete([1, 2], **sampling).tokens)


async def test_clients(site: SiteMaker, auth: Auth) -> None:
    async with site(auth=auth) as here:
        address = here.addresses["grpc"]
        sampling: Any = {"max_tokens": 3, "ignore_eos": True}
        async with await AsyncClient.connect(address, api_key=KEY) as client:
            assert len((await client.complete([1, 2], **sampling)).tokens) == 3
        async with AsyncClient(address) as stranger:
            with pytest.raises(BatonError) as refusal:
                await stranger.models()
            assert refusal.value.kind is ErrorKind.UNAUTHENTICATED
        assert await asyncio.to_thread(completes, address, sampling) == 3
        assert await metric(here, "baton_router_unauthenticated_total") == {'api="grpc",model="fake"': 1}


async def test_admin_ports_need_no_api_key(site: SiteMaker, auth: Auth) -> None:
    async with site(auth=auth) as here:
        async with httpx.AsyncClient(
            base_url=f"http://{here.addresses['admin_http']}", verify=False
        ) as client:
            await client.get(f"http://{here.addresses['http']}/v1/models")
        assert await metric(here, "baton_router_unauthenticated_total") == {'api="http",model="fake"': 1}


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_loadgen_sends_its_key(
    site: SiteMaker, auth: Auth, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(auth=auth) as here:
        target = TargetSettings(url=f"{scheme}://{here.addresses[scheme]}")
        with pytest.raises(LoadgenError, match="does not report which model"):
            await served_model(target)
        monkeypatch.setenv(target.api_key_env, KEY)
        assert await served_model(target) == MODEL
