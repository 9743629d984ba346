"""Undocumented fields are ignored and named, by both APIs and however large the request; or refused."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from baton.base.errors import FieldError
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest
from services.router.formats.ignored_fields import HEADER, IgnoredFields, shown
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request
from tests.router.http_client import complete, http

# Field 77 with the number 1, as protobuf encodes it.
UNKNOWN = b"\xe8\x04\x01"
LARGE = "a" * 70_000
MESSAGE = {"role": "user", "content": "a", "mood": "good"}
CHAT: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "odd": 1, "messages": [MESSAGE, MESSAGE]}
LARGE_CHAT = {**CHAT, "odd": LARGE, "messages": [{**MESSAGE, "mood": "x" * 70_000}]}


async def generate(here: Site, data: bytes) -> Any:
    """The call of Generate with these bytes, once it has ended."""
    async with grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
        method: Any = channel.unary_stream("/baton.v1.RouterService/Generate", None, None)
        call = method(data, timeout=10)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error
        return call


@pytest.mark.parametrize("stream", [False, True])
async def test_http_names_ignored_fields(site: SiteMaker, stream: bool) -> None:
    async with site() as here, http(here) as client:
        options = {"stream_options": {"novelty": 1}} if stream else {}
        answer = await complete(client, max_tokens=2, stream=stream, unheard_of=LARGE[:9], **options)
        assert answer.status_code == 200, answer.text
        named = "unheard_of, stream_options.novelty" if stream else "unheard_of"
        assert answer.headers[HEADER] == named
        assert HEADER not in (await complete(client, max_tokens=2)).headers


@pytest.mark.parametrize("body", [CHAT, LARGE_CHAT], ids=["small", "large"])
async def test_fields_of_messages_are_named_once(site: SiteMaker, body: dict[str, Any]) -> None:
    async with site() as here, http(here) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.headers[HEADER]) == (200, "odd, messages[].mood")
        tokens = await client.post("/tokenize", json={"messages": body["messages"], "odd": body["odd"]})
        assert (tokens.status_code, tokens.headers[HEADER]) == (200, "odd, messages[].mood")


async def test_grpc_names_the_numbers_of_ignored_fields(site: SiteMaker) -> None:
    async with site() as here:
        turn = ChatMessage(role="user", content="a")
        turn.MergeFromString(UNKNOWN)
        chat = GenerateRequest(model=MODEL, max_tokens=2, chat=ChatMessages(messages=[turn, turn]))
        call = await generate(here, chat.SerializeToString() + UNKNOWN)
        assert await call.code() is grpc.StatusCode.OK
        assert dict(await call.trailing_metadata())[HEADER] == "77, chat.messages[].77"
        call = await generate(here, ids_request([1, 2], 2).SerializeToString())
        assert HEADER not in dict(await call.trailing_metadata())


async def test_strict_fields_refuse_them_over_both_apis(site: SiteMaker) -> None:
    async with site(strict_fields=True) as here, http(here) as client:
        for body in (CHAT, LARGE_CHAT):
            refused = await client.post("/v1/chat/completions", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, "odd", "unknown_parameter")
        refused = await client.post("/detokenize", content='{"tokens": [1], "\\u00e9": 1}')
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "?")
        error = await generate(here, ids_request([1, 2], 2).SerializeToString() + UNKNOWN)
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "unknown field 77")
        assert (await complete(client, max_tokens=2, user="a")).status_code == 200


def test_what_is_shown_is_short_and_printable() -> None:
    assert shown(["a\r\nx: y", "é", "", "b" * 100]) == f"a??x??y, ?, ?, {'b' * 64}"
    assert shown([f"f{number}" for number in range(18)]).endswith("f15, and 2 more")


def test_the_log_has_each_name_once_and_at_most_256() -> None:
    ignored = IgnoredFields(strict=False)
    with capture_logs() as lines:
        ignored.report(["mood"])
        ignored.report(["mood", "tone"])
        ignored.report([f"f{number}" for number in range(1000)])
        ignored.report(["last"])
        ignored.report([])
    assert [line["event"] for line in lines] == ["fields_ignored"] * 3
    assert [line["fields"] for line in lines[:2]] == ["mood", "tone"]
    with pytest.raises(FieldError):
        IgnoredFields(strict=True).report(["mood"])
