"""Every invalid request gets the right status from both APIs, and the workers continue."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.api.conftest import CONTEXT
from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free
from tests.e2e.support.completions import complete
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

INVALID = grpc.StatusCode.INVALID_ARGUMENT
GENERATE = "/baton.v1.RouterService/Generate"


@pytest.fixture
def cluster(small: Cluster) -> Cluster:
    return small


@asynccontextmanager
async def unharmed(cluster: Cluster, model: Path) -> AsyncIterator[RouterServiceAsyncStub]:
    """Checks afterwards that no worker ran a prompt, that all is free, and that a good request works."""
    async with cluster.stub() as stub, cluster.http() as client:
        before = {name: report.prompts_run for name, report in (await cluster.reports()).items()}
        yield stub
        await assert_all_free(cluster, within_s=2)
        after = await cluster.reports()
        assert {name: report.prompts_run for name, report in after.items()} == before
        prompt = [random.Random(1).randrange(VOCAB_SIZE) for _ in range(40)]
        answer = await cluster.generate(stub, prompt, temperature=0.0, max_tokens=12)
        greedy_matches(load_reference(model), prompt, answer.token_ids)
        again = await complete(client, prompt, temperature=0, max_tokens=12)
        assert again.only.token_ids == answer.token_ids
        await assert_all_free(cluster, within_s=2)


# What is wrong, where both APIs can say it: the fields of gRPC, those of HTTP, and the param HTTP names.
BOTH: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"token_ids": TokenIds()}, {"prompt": []}, "prompt"),
    ({"text": ""}, {"prompt": ""}, "prompt"),
    ({"token_ids": TokenIds(ids=[7] * CONTEXT)}, {"prompt": [7] * CONTEXT}, "prompt"),
    ({"text": "q" * 3 * CONTEXT}, {"prompt": "q" * 3 * CONTEXT}, "prompt"),
    ({"token_ids": TokenIds(ids=[1, VOCAB_SIZE])}, {"prompt": [1, VOCAB_SIZE]}, "prompt"),
    ({"token_ids": TokenIds(ids=[2**32 - 1])}, {"prompt": [2**32 - 1]}, "prompt"),
    ({"temperature": -1.0}, {"temperature": -1}, "temperature"),
    ({"top_p": -0.5}, {"top_p": -0.5}, "top_p"),
    ({"top_p": 1.5}, {"top_p": 1.5}, "top_p"),
    ({"stop": [""]}, {"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, {"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": range(8)}, {"stop_token_ids": list(range(8))}, "stop_token_ids"),
    ({"logprobs": 21}, {"logprobs": 21}, "logprobs"),
    ({"n": 129}, {"n": 129}, "n"),
    ({"min_p": 1.5}, {"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0.0}, {"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 20}, {"min_tokens": 20}, "min_tokens"),
]
# What only one API can say.
GRPC_ONLY: list[dict[str, Any]] = [{"temperature": float("nan")}, {"top_p": float("inf")}]
HTTP_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"best_of": 2}, "best_of"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options"),
]
BROKEN_JSON = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "test-model", "prompt": ', b"[" * 10**5]
BROKEN_PROTOBUF = [b"\xff", b"\x0a\xff\xff\xff\x7fabc", b"\x1a\x03\x0a\x7f\x01", b"\x0a\x02\xff\xfe"]


async def test_both_apis_refuse_absurd_requests(cluster: Cluster, model: Path) -> None:
    async with unharmed(cluster, model) as stub, cluster.http() as client:
        for fields, body, param in BOTH:
            await refused(stub, INVALID, **fields)
            assert await refusal(client, body) == param, body
            assert await refusal(client, {**body, "stream": True}) == param, body
        for fields in GRPC_ONLY:
            await refused(stub, INVALID, **fields)
        for body, param in HTTP_ONLY:
            assert await refusal(client, body) == param, body


async def refused(stub: RouterServiceAsyncStub, code: grpc.StatusCode, **fields: Any) -> None:
    """The call fails with this status and one line, before any message."""
    prompt = {} if fields.keys() & {"text", "token_ids", "chat"} else {"text": "a prompt"}
    request = GenerateRequest(**{"model": MODEL, **prompt, **fields})
    call = stub.Generate(request, timeout=20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == code, (fields, caught.value)
    assert one_line(caught.value.details())


async def refusal(client: Any, body: dict[str, Any]) -> str | None:
    """The param of the 400 with OpenAI's error body that this body gets."""
    response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a prompt", **body})
    assert response.status_code == 400, (body, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert one_line(error["message"])
    param: str | None = error["param"]
    return param


def one_line(message: str | None) -> bool:
    return message is not None and 0 < len(message) < 300 and "\n" not in message


async def test_an_unknown_model_is_not_found(cluster: Cluster, model: Path) -> None:
    async with unharmed(cluster, model) as stub, cluster.http() as client:
        await refused(stub, grpc.StatusCode.NOT_FOUND, model="other")
        await refused(stub, grpc.StatusCode.NOT_FOUND, model="")
        response = await client.post("/v1/completions", json={"model": "other", "prompt": "a"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 200
        assert (await client.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
        assert (await client.get("/v1/completions")).status_code == 405


async def test_broken_bytes(cluster: Cluster, model: Path) -> None:
    async with unharmed(cluster, model), cluster.http() as client:
        for body in BROKEN_JSON:
            response = await client.post("/v1/completions", content=body)
            assert response.status_code == 400, (body[:40], response.text)
            assert response.json()["error"]["type"] == "invalid_request_error"
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            call = channel.unary_stream(GENERATE, None, None)
            for data in BROKEN_PROTOBUF:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(data, timeout=20).read()
                assert caught.value.code() == INVALID, data


async def test_the_longest_prompt_may_leave_one_token(cluster: Cluster, model: Path) -> None:
    """The limit itself and one less are served; one more was refused above."""
    async with cluster.stub() as stub, cluster.http() as client:
        for length, room in ((CONTEXT - 1, 1), (CONTEXT - 2, 2)):
            prompt = [5] * length
            answer = await cluster.generate(stub, prompt, temperature=0.0, max_tokens=99, ignore_eos=True)
            assert (len(answer.token_ids), answer.finish) == (room, "length")
            completion = await complete(client, prompt, temperature=0, max_tokens=99, ignore_eos=True)
            assert completion.only.token_ids == answer.token_ids
            greedy_matches(load_reference(model), prompt, answer.token_ids)
        most = await cluster.generate(stub, [5], max_tokens=2**32 - 1, ignore_eos=True)
        assert len(most.token_ids) == CONTEXT - 1
        await assert_all_free(cluster, within_s=2)
