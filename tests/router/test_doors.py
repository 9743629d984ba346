"""What both doors refuse, and how each says it; what HTTP answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1.router_pb2 import AuditClusterRequest, ChatMessage, ChatMessages, GenerateRequest
from baton.v1.types_pb2 import FinishReason
from tests.router.conftest import EOS, MODEL, Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_workers import VOCAB, expected, next_token

CONTEXT = 256


def http(here: Site) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{here.addresses['http']}", timeout=10)


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body)


# Field of HTTP (and of gRPC, where it can be said there), a value that is refused.
REFUSED: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("temperature", 1e300),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_p", 1e-60),
    ("top_k", -1),
    ("top_k", 2**32),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 10**30),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("seed", -1),
    ("seed", 2**64),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("stop", ["a" * 1025]),
    ("stop", [1]),
    ("stop_token_ids", list(range(9))),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [1, VOCAB]),
    ("prompt", [-1]),
    ("prompt", [10**40]),
    ("prompt", [1, "a"]),
    ("prompt", [True, False]),
    ("prompt", [["a"]]),
    ("prompt", None),
    ("prompt", {"a": 1}),
    ("prompt", [1] * CONTEXT),
    ("prompt", ["a"] * 257),
    ("logprobs", 0),
    ("logprobs", 5),
    ("echo", True),
    ("n", 2),
    ("n", True),
    ("best_of", 3),
    ("suffix", "x"),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -1),
    ("repetition_penalty", 1.1),
    ("logit_bias", {"5": 1}),
    ("min_p", 0.1),
    ("min_tokens", 3),
    ("unheard_of", 1),
    ("stream_options", {"include_usage": True}),
    ("stream", "yes"),
]


async def test_http_refuses(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        for field, value in REFUSED:
            response = await complete(client, **{field: value})
            assert response.status_code == 400, (field, value, response.text)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == field, (field, value, error)
            assert set(error) == {"message", "type", "param", "code"}
        assert not here.worker("decode-0").reserves
        assert (await complete(client)).status_code == 200


async def test_http_accepts_neutral_values(site: SiteMaker) -> None:
    neutral: dict[str, Any] = {
        "suffix": "", "logprobs": None, "echo": False, "n": 1, "best_of": 1, "presence_penalty": 0,
        "frequency_penalty": 0.0, "logit_bias": {}, "min_p": 0, "min_tokens": 0, "repetition_penalty": 1.0,
        "user": "somebody", "top_k": 0, "top_p": 1, "seed": 2**64 - 1, "stop": None, "stream": False,
        "skip_special_tokens": True,
    }  # fmt: skip
    async with site() as here, http(here) as client:
        assert (await complete(client, **neutral)).status_code == 200


GRPC_REFUSED: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": 101.0},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_p": float("nan")},
    {"max_tokens": 0},
    {"stop": [""]},
    {"stop": ["a"] * 17},
    {"stop_token_ids": list(range(9))},
    {"stop_token_ids": list(range(8)), "ignore_eos": False},
    {"stop_token_ids": [VOCAB]},
    {"ids": []},
    {"ids": [VOCAB]},
    {"ids": [1] * CONTEXT},
    {"logprobs": 1},
]


async def test_grpc_refuses(site: SiteMaker) -> None:
    async with site() as here:
        for fields in GRPC_REFUSED:
            request = ids_request(fields.get("ids", [1]), **{k: v for k, v in fields.items() if k != "ids"})
            assert await code_of(here, request) == grpc.StatusCode.INVALID_ARGUMENT, fields
        for prompt in ({"text": ""}, {"chat": ChatMessages()}, {}):
            request = GenerateRequest(model=MODEL, **prompt)
            assert await code_of(here, request) == grpc.StatusCode.INVALID_ARGUMENT, prompt
        refused = ChatMessages(messages=[ChatMessage(role="refused", content="")])
        assert (
            await code_of(here, GenerateRequest(model=MODEL, chat=refused))
            == grpc.StatusCode.INVALID_ARGUMENT
        )
        other = GenerateRequest(model="other", text="a")
        assert await code_of(here, other) == grpc.StatusCode.NOT_FOUND
        assert not here.worker("decode-0").reserves


async def code_of(here: Site, request: GenerateRequest) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await here.generate(request)
    return caught.value.code()


async def test_the_context_is_exact(site: SiteMaker) -> None:
    """A prompt may leave one token of the context; max_tokens is cut to what is left."""
    async with site() as here:
        longest = [3] * (CONTEXT - 1)
        responses = await here.generate(ids_request(longest, 10))
        assert tokens_of(responses) == expected(longest, 1)
        assert responses[-1].finish_reason == FinishReason.FINISH_REASON_LENGTH
        assert len(tokens_of(await here.generate(ids_request(longest[3:], 10)))) == 4


async def test_broken_bytes(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        async with grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
            for method in ("Generate", "ListModels", "AuditCluster"):
                call = channel.unary_unary(f"/baton.v1.RouterService/{method}", bytes, bytes)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"\xff\xff\xff", timeout=5)
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        for text in (
            '{"model": ',
            "[]",
            '"a"',
            "",
            '{"model": "fake", "prompt": "a", "top_p": NaN}',
            "\xff",
            "[" * 99999,
        ):
            response = await client.post("/v1/completions", content=text.encode("latin-1"))
            assert response.status_code == 400, text[:50]
            assert response.json()["error"]["type"] == "invalid_request_error"
        too_large = await client.post("/v1/completions", content=b" " * (16 * 2**20 + 1))
        assert too_large.status_code == 400


async def test_unknown_model_and_paths(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        response = await complete(client, model="other")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert response.json()["error"]["param"] == "model"
        for path, status in (("/v1/nothing", 404), ("/v1/models/other", 404)):
            answer = await client.get(path)
            assert answer.status_code == status
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await client.get("/v1/completions")).status_code == 405


async def test_models_and_health(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        models = (await client.get("/v1/models")).json()
        assert models["object"] == "list"
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert models["data"][0]["max_model_len"] == CONTEXT
        assert (await client.get(f"/v1/models/{MODEL}")).json() == models["data"][0]
        assert (await client.get("/health")).status_code == 200
        async with grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "baton.v1.RouterService"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        here.worker("decode-0").behaviour.draining = True
        await until(lambda: not here.router.service.usable())
        assert (await client.get("/health")).status_code == 503


async def test_a_completion(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        response = await complete(client, max_tokens=5, return_token_ids=True)
        body = response.json()
        assert body["id"].startswith("cmpl-")
        assert (body["object"], body["model"]) == ("text_completion", MODEL)
        choice = body["choices"][0]
        assert choice["token_ids"] == expected([1, 2, 3], 5)
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
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
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 18, "total_tokens": 23}
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for chunk in events(client, prompt=prompt, max_tokens=6, return_token_ids=True):
            got[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
        assert list(got.values()) == want
        await here.quiet()


async def events(client: httpx.AsyncClient, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE] (or else with an error)."""
    body = {
        "model": MODEL,
        "prompt": [1, 2, 3],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    done = failed = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if not line:
                continue
            assert not done
            assert line.startswith("data: ")
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            failed = "error" in chunk
            yield chunk
    assert done != failed


@pytest.mark.parametrize("ids", [True, False])
async def test_a_stream_says_what_the_whole_says(site: SiteMaker, ids: bool) -> None:
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


async def test_a_stream_that_fails_says_so(site: SiteMaker) -> None:
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
            await until(lambda: here.worker("decode-0").used_slots == 2)
            await asyncio.sleep(0.1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await here.quiet()
        assert here.worker("decode-0").cancels == 2


def stop_after(prompt: list[int], count: int) -> int:
    """A token id that first comes as the output's token number `count - 1`."""
    output = expected(prompt, count)
    assert output[-1] not in output[:-1]
    return output[-1]


async def test_stop_token_ids(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        for count in (1, 4):
            stop = stop_after([1, 2, 3], count)
            body = (await complete(client, stop_token_ids=[stop], return_token_ids=True)).json()
            choice = body["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert choice["token_ids"] == expected([1, 2, 3], count)
            assert body["usage"]["completion_tokens"] == count
        await here.quiet()


async def test_the_end_of_sequence_id_ends_unless_ignored(site: SiteMaker) -> None:
    prompt = next([index] for index in range(VOCAB) if next_token([index]) == EOS)
    async with site() as here:
        responses = await here.generate(ids_request(prompt, 5, ignore_eos=False))
        assert tokens_of(responses) == [EOS]
        assert responses[-1].finish_reason == FinishReason.FINISH_REASON_STOP
        assert "".join(response.text for response in responses) == ""
        assert len(tokens_of(await here.generate(ids_request(prompt, 5)))) == 5
        shown = await here.generate(ids_request(prompt, 1, skip_special_tokens=False))
        assert "".join(response.text for response in shown) == "<|end|>"
        hidden = await here.generate(ids_request(prompt, 1))
        assert "".join(response.text for response in hidden) == ""


async def test_stop_strings_end_and_cancel(site: SiteMaker) -> None:
    """The cut is exact, ids go up to the token that completed the match, the slot is freed."""
    async with site() as here, http(here) as client:
        prompt, count = readable_prompt()
        output = expected(prompt, count)
        stop = bytes(output[-2:]).decode()
        here.worker("decode-0").behaviour.step_s = 0.005
        fields = {"prompt": prompt, "max_tokens": 200, "stop": [stop, "zzzz"], "return_token_ids": True}
        body = (await complete(client, **fields)).json()
        choice = body["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"] == output
        assert body["usage"]["completion_tokens"] == count
        assert stop not in choice["text"]
        chunks = [chunk async for chunk in events(client, **fields)]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
        await here.quiet()
        assert here.worker("decode-0").cancels == 2


def readable_prompt() -> tuple[list[int], int]:
    """A prompt whose output soon has two plain letters side by side, and where."""
    for first in range(VOCAB):
        output = expected([first, 5], 12)
        for end in range(3, 12):
            if all(97 <= token < 123 for token in output[end - 2 : end]):
                pair = output[end - 2 : end]
                if all(output[i : i + 2] != pair for i in range(end - 2)):
                    return [first, 5], end
    raise AssertionError("no such prompt")


async def test_the_seed_is_drawn_and_told(site: SiteMaker) -> None:
    async with site() as here:
        seeds = {(await here.generate(ids_request([1], 2)))[-1].trace.seed for _ in range(4)}
        sent = {request.sampling.seed for request in here.worker("prefill-0").prefill_requests}
        assert len(seeds) == 4
        assert seeds == sent


async def test_audit(site: SiteMaker) -> None:
    async with site() as here:
        await here.generate(ids_request([1], 2))
        await here.router.directory.add("127.0.0.1:1")
        response = await here.stub.AuditCluster(AuditClusterRequest())
        by_name = {worker.identity.name: worker for worker in response.workers}
        assert set(by_name) == {"prefill-0", "decode-0", ""}
        assert by_name["prefill-0"].audit.prompts_run == 1
        assert by_name["decode-0"].audit.prompts_run == 0
        assert by_name[""].error
        assert not by_name["decode-0"].error
