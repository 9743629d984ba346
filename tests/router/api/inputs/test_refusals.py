"""Requests that both APIs refuse, and the errors they refuse them with."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest
from baton.v1.types_pb2 import FinishReason, LogitBias
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, tokens_of
from tests.router.fake_model import VOCAB, expected
from tests.router.http_client import complete, http

CONTEXT = 256

# Field of HTTP (and of gRPC, if it can be expressed there), a value that is refused.
REFUSED: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", -1e300),
    ("temperature", "1"),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 2**63),
    ("max_tokens", -5),
    ("max_tokens", 10**30),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("seed", -(2**63) - 1),
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
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("echo", 1),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("best_of", 3),
    ("suffix", "x"),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 3),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("logit_bias", {str(VOCAB): 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 1, "05": 1}),
    ("logit_bias", {str(token): 1 for token in range(301)}),
    ("logit_bias", [1]),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("top_n_sigma", -2),
    ("top_n_sigma", "1"),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}),
    ("response_format", "json_object"),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"structural_tag": "{}"}),
    ("structured_outputs", {"choice": []}),
    ("stream_options", {"include_usage": "yes"}),
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
        assert not here.worker("decode-0").decode.reserves
        assert (await complete(client)).status_code == 200


async def test_http_accepts_neutral_values(site: SiteMaker) -> None:
    neutral: dict[str, Any] = {
        "suffix": "", "logprobs": None, "echo": False, "n": 1, "best_of": 1, "presence_penalty": 0,
        "frequency_penalty": 0.0, "logit_bias": {}, "min_p": 0, "min_tokens": 0, "repetition_penalty": 1.0,
        "user": "somebody", "top_k": 0, "top_p": 1, "seed": 2**64 - 1, "stop": None, "stream": False,
        "skip_special_tokens": True, "top_n_sigma": -1,
    }  # fmt: skip
    async with site() as here, http(here) as client:
        assert (await complete(client, **neutral)).status_code == 200


GRPC_REFUSED: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_p": 1.5},
    {"top_p": float("nan")},
    {"stop": [""]},
    {"stop": ["a"] * 17},
    {"stop_token_ids": list(range(9))},
    {"stop_token_ids": list(range(8)), "ignore_eos": False},
    {"stop_token_ids": [VOCAB]},
    {"ids": []},
    {"ids": [VOCAB]},
    {"ids": [1] * CONTEXT},
    {"logprobs": 21},
    {"n": 0},
    {"n": 129},
    {"min_p": 1.5},
    {"min_p": float("nan")},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -3.0},
    {"repetition_penalty": 0.0},
    {"min_tokens": 9},
    {"logit_bias": [LogitBias(token_id=VOCAB, bias=1)]},
    {"logit_bias": [LogitBias(token_id=1, bias=1), LogitBias(token_id=1, bias=2)]},
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
        assert not here.worker("decode-0").decode.reserves


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
            for method in ("Generate", "ListModels", "GetStatus"):
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
        halves = (
            ("/v1/completions", '{"model": "fake", "prompt": "\\ud800", "echo": true}'),
            (
                "/v1/chat/completions",
                '{"model": "fake", "messages": [{"role": "user", "content": "\\udfff"}]}',
            ),
            ("/tokenize", '{"prompt": "\\ud800"}'),
        )
        for path, text in halves:
            assert (await client.post(path, content=text)).status_code == 400, path
        too_large = await client.post("/v1/completions", content=b" " * (16 * 2**20 + 1))
        assert too_large.status_code == 413


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
