"""Responses of both APIs: models, health, integrity report, completions whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1.admin_pb2 import AdminServiceGetAuditRequest
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest
from tests.router.conftest import MODEL, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.http_client import complete, events, http

CONTEXT = 256


async def test_models_and_health(site: SiteMaker) -> None:
    async with site(queue_timeout_s=0.3) as here, http(here) as client:
        models = (await client.get("/v1/models")).json()
        assert models["object"] == "list"
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert models["data"][0]["max_model_len"] == CONTEXT
        assert (await client.get(f"/v1/models/{MODEL}")).json() == models["data"][0]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        async with grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "baton.v1.RouterService"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        here.worker("decode-0").behaviour.draining = True
        await until(lambda: not here.router.readiness.ready())
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no decode worker is ready")
        assert (await client.get("/health")).status_code == 200


async def test_a_completion(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        response = await complete(client, max_tokens=5, return_token_ids=True)
        body = response.json()
        assert body["id"].startswith("cmpl-")
        assert (body["object"], body["model"]) == ("text_completion", MODEL)
        choice = body["choices"][0]
        assert choice["token_ids"] == expected([1, 2, 3], 5)
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert (await complete(client)).json()["usage"]["completion_tokens"] == 16


async def test_text_prompts_are_tokenised(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        body = (await complete(client, prompt="hé", return_token_ids=True)).json()
        assert body["choices"][0]["token_ids"] == expected(list("hé".encode()), 16)
        chat = ChatMessages(messages=[ChatMessage(role="user", content="hi")])
        request = GenerateRequest(model=MODEL, chat=chat, temperature=0, max_tokens=4, ignore_eos=True)
        responses = await here.generate(request)
        assert tokens_of(responses) == expected(list(b"<user>hi\n<assistant>"), 4)


@pytest.mark.parametrize("prompt", [["ab", "cd", "e"], [[97, 98], [99, 100], [101]]])
async def test_lists_of_prompts(site: SiteMaker, prompt: list[Any]) -> None:
    async with site() as here, http(here) as client:
        want = [expected(list(text), 6) for text in (b"ab", b"cd", b"e")]
        body = (await complete(client, prompt=prompt, max_tokens=6, return_token_ids=True)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [choice["token_ids"] for choice in body["choices"]] == want
        assert body["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 18,
            "total_tokens": 23,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for chunk in events(client, prompt=prompt, max_tokens=6, return_token_ids=True):
            got[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
        assert list(got.values()) == want
        await here.quiet()


@pytest.mark.parametrize("ids", [True, False])
async def test_a_stream_equals_the_whole_response(site: SiteMaker, ids: bool) -> None:
    async with site() as here, http(here) as client:
        fields = {"prompt": "stream", "max_tokens": 40, "return_token_ids": ids}
        whole = (await complete(client, **fields)).json()
        chunks = [chunk async for chunk in events(client, stream_options={"include_usage": True}, **fields)]
        *tokens, usage = chunks
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in tokens)
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        choices = [chunk["choices"][0] for chunk in tokens]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert all(("token_ids" in choice) == ids for choice in choices)
        plain = [chunk async for chunk in events(client, **fields)]
        assert all("usage" not in chunk for chunk in plain)


async def test_a_failed_stream_ends_with_an_error(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        here.worker("decode-0").behaviour.skip_number = 3
        here.worker("decode-0").behaviour.step_s = 0.01
        chunks = [chunk async for chunk in events(client)]
        assert chunks[0]["choices"][0]["finish_reason"] is None
        assert chunks[-1]["error"]["type"] == "server_error"
        here.worker("prefill-0").behaviour.break_prefills = 100
        body = {"model": MODEL, "prompt": "a", "stream": True}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        await here.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_cancels(site: SiteMaker, stream: bool) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.step_s = 0.02
        async with http(here) as client:
            call = asyncio.create_task(complete(client, prompt=["a", "b"], max_tokens=200, stream=stream))
            await until(lambda: here.worker("decode-0").decode.used_slots == 2)
            await asyncio.sleep(0.1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await here.quiet()
        assert here.worker("decode-0").decode.cancels == 2


async def test_the_drawn_seed_is_in_the_trace(site: SiteMaker) -> None:
    async with site() as here:
        seeds = {(await here.generate(ids_request([1], 2)))[-1].trace.seed for _ in range(4)}
        sent = {request.sampling.seed for request in here.worker("prefill-0").prefill.requests}
        assert len(seeds) == 4
        assert seeds == sent


async def test_integrity_report(site: SiteMaker) -> None:
    async with site() as here:
        await here.generate(ids_request([1], 2))
        here.router.directory.add("127.0.0.1:1")
        response = await here.admin.GetAudit(AdminServiceGetAuditRequest())
        by_name = {worker.identity.name: worker for worker in response.workers}
        assert set(by_name) == {"prefill-0", "decode-0", ""}
        assert by_name["prefill-0"].report.prompts_run == 1
        assert by_name["decode-0"].report.prompts_run == 0
        assert by_name[""].error
        assert not by_name["decode-0"].error
