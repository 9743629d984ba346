"""Deadlines and idempotency keys, beside the request at both APIs; fields that gRPC has as HTTP has them."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from baton.base.errors import ErrorKind, FieldError
from baton.rpc.grpc_errors import from_status
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, GenerateResponse
from baton.v1.types_pb2 import Grammar
from tests.router.conftest import EOS, MODEL, Site, SiteMaker, ids_request
from tests.router.http_client import complete, http


async def refusal(here: Site, request: GenerateRequest, **options: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in here.stub.Generate(request, **options):
            pass
    error = refused.value
    metadata: Any = error.trailing_metadata() or ()
    return from_status(error.code(), error.details(), metadata)


async def test_an_idempotency_key_is_refused_by_name(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        answer = await client.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "a"},
            headers={"Idempotency-Key": "5f0c"},
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (
            400,
            "idempotency-key",
            "unsupported_parameter",
        )
        refused = await refusal(here, ids_request([1]), metadata=(("idempotency-key", "5f0c"),))
        assert isinstance(refused, FieldError)
        assert (refused.kind, refused.param) == (ErrorKind.INVALID, "idempotency-key")
        assert here.worker("prefill-0").prefill.prompts == []


@pytest.mark.parametrize("value", ["-1", "nan", "soon", "1e9", ""])
async def test_a_timeout_is_a_number_of_milliseconds(site: SiteMaker, value: str) -> None:
    async with site() as here, http(here) as client:
        client.headers["x-request-timeout-ms"] = value
        answer = await complete(client, max_tokens=2)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout-ms")


async def test_a_deadline_holds_over_http_as_over_grpc(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        client.headers["x-request-timeout-ms"] = "0"
        answer = await complete(client, max_tokens=2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert here.worker("prefill-0").prefill.prompts == []
        client.headers["x-request-timeout-ms"] = "60000"
        assert (await complete(client, max_tokens=2)).status_code == 200
        here.worker("decode-0").behaviour.step_s = 0.05
        client.headers["x-request-timeout-ms"] = "250"
        answer = await complete(client, max_tokens=100, ignore_eos=True)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        assert (await refusal(here, ids_request([1], 100), timeout=0.25)).kind is ErrorKind.DEADLINE
        await here.quiet()


def text_of(responses: list[GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


async def test_grpc_has_the_fields_of_http(site: SiteMaker) -> None:
    """Template variables, the answer's beginning and special tokens make the same prompts; any JSON object
    is the same schema."""
    async with site() as here, http(here) as client:
        prompts = here.worker("prefill-0").prefill.prompts
        messages = [{"role": "user", "content": "a"}]
        for variables, prompted in (({"mood": "calm"}, True), ({}, False)):
            fields: dict[str, Any] = {"chat_template_kwargs": variables, "add_generation_prompt": prompted}
            answer = await client.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 1, **fields}
            )
            assert answer.status_code == 200, answer.text
            chat = ChatMessages(
                messages=[ChatMessage(role="user", content="a")],
                chat_template_kwargs='{"mood": "calm"}' if variables else "",
                add_generation_prompt=prompted,
            )
            await here.generate(GenerateRequest(model=MODEL, chat=chat, max_tokens=1))
            assert prompts[-1] == prompts[-2]
        assert prompts[-1] != prompts[-3]
        any_object = {
            "model": MODEL,
            "prompt": "a",
            "structured_outputs": {"json_object": True},
            "max_tokens": 1,
        }
        assert (await client.post("/v1/completions", json=any_object)).status_code == 200
        for wanted in (True, False):
            request = GenerateRequest(model=MODEL, text="a", max_tokens=1)
            request.grammar.CopyFrom(Grammar(json_object=wanted))
            await here.generate(request)
        schemas = [one.grammar.json_schema for one in here.worker("prefill-0").prefill.requests[-3:]]
        assert schemas == ['{"type":"object"}', '{"type":"object"}', ""]
        assert EOS not in prompts[-1]
        for special in (True, False):
            await here.generate(
                GenerateRequest(model=MODEL, text="a", max_tokens=1, add_special_tokens=special)
            )
