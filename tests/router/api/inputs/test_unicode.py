"""Text that is no Unicode is refused at every door, in every field, in every encoding, for small and large
requests; what is Unicode is served in every encoding that JSON knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, Tool
from services.router.formats.json_bodies import encode_with_lists, utf8
from services.router.request import sizes
from tests.router.conftest import MODEL, SiteMaker
from tests.router.http_client import http

# Bytes that are no UTF-8: halves of surrogate pairs, a whole pair, overlong, beyond Unicode, alone, cut off.
INVALID = (
    b"\xed\xa0\x80",
    b"\xed\xb0\x80",
    b"\xed\xa0\x80\xed\xb0\x80",
    b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"\xff",
)
MARK = "MARK"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": MARK, "parameters": {MARK: MARK}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": MARK}}
USER = {"role": "user", "content": "hi"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": MARK}),
    ("/v1/completions", {"prompt": "a", "stop": [MARK]}),
    ("/v1/completions", {"prompt": "a", "user": MARK}),
    ("/v1/completions", {"prompt": "a", MARK: 1}),
    ("/v1/completions", {"prompt": ["a", MARK], "echo": True}),
    ("/v1/completions", {"prompt": "a", "guided_regex": MARK}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": MARK}]}]}),
    ("/v1/chat/completions", {"messages": [{**USER, "name": MARK}]}),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}),
    ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}),
    ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"mood": MARK}}),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"json": {"const": MARK}}}),
    (
        "/v1/chat/completions",
        {"messages": [USER], "structured_outputs": {"json": {}, "whitespace_pattern": MARK}},
    ),
    ("/v1/responses", {"input": MARK}),
    ("/v1/responses", {"input": "a", "instructions": MARK}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "name": MARK}}}),
    ("/v1/responses", {"input": "a", "metadata": {"a": MARK}}),
    ("/tokenize", {"prompt": MARK}),
    ("/tokenize", {"messages": [{"role": "user", "content": MARK}]}),
    ("/detokenize", {"tokens": [1], MARK: 1}),
]


def body(path: str, fields: dict[str, Any], text: str = MARK) -> str:
    common = {} if "tokenize" in path else {"max_output_tokens" if "responses" in path else "max_tokens": 2}
    document = {"model": MODEL, **common, **fields}
    return json.dumps(document, ensure_ascii=False).replace(MARK, text)


def spoiled(path: str, fields: dict[str, Any]) -> Iterator[bytes]:
    """The body with what is no Unicode in the mark's place, in each encoding."""
    plain = body(path, fields)
    for one in INVALID:
        yield plain.encode().replace(MARK.encode(), one)
    for escape in ("\\ud800", "\\uDFFF", "\\ud800a", "\\udc00\\ud800"):
        for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"):
            yield body(path, fields, escape).encode(encoding)
    for encoding in ("utf-16-le", "utf-16-be"):
        yield body(path, fields, "\ud800").encode(encoding, "surrogatepass")
    yield plain.encode("latin-1").replace(MARK.encode(), b"\xe9")


@pytest.mark.parametrize(
    ("large", "every"), [(False, 4), pytest.param(False, 1, marks=pytest.mark.slow), (True, 8)]
)
async def test_http(site: SiteMaker, large: bool, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:  # every body is a helper process's
        monkeypatch.setattr(sizes, "LARGE_BYTES", 16)
        monkeypatch.setattr(sizes, "LARGE_TOKENIZE_BYTES", 16)
    headers = {"content-type": "application/json"}
    async with site() as here, http(here) as client:
        for number, (path, fields) in enumerate(BODIES):
            # Each field meets some of the ways, each way some fields.
            for at, content in enumerate(spoiled(path, fields)):
                if (at + number) % every:
                    continue
                answer = await client.post(path, content=content, headers=headers, timeout=5)
                assert answer.status_code == 400, (path, content, answer.text)
                assert answer.json()["error"]["type"] == "invalid_request_error"
        for path, fields in BODIES[0], BODIES[6], BODIES[14], BODIES[18]:
            served = set()
            for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"):
                for text in ("é日😀", "\\u00e9\\u65e5\\ud83d\\ude00"):
                    content = body(path, fields, text).encode(encoding)
                    answer = await client.post(path, content=content, headers=headers)
                    assert answer.status_code == 200, (path, encoding, answer.text)
                    document = answer.json()
                    served.add(str(document.get("usage") or document["tokens"]))
            assert len(served) == 1
        await here.quiet()


async def test_json_within_json(site: SiteMaker) -> None:
    """Texts that are JSON themselves may escape half a pair, which is none in the body."""
    half = json.dumps({"a": "\ud800"})
    call = {**CALL, "function": {"name": "f", "arguments": half}}
    async with site() as here, http(here) as client:
        for fields, status in (
            ({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}, 200),
            ({"messages": [USER], "structured_outputs": {"json": json.dumps({"const": "\ud800"})}}, 400),
        ):
            answer = await client.post(
                "/v1/chat/completions", json={"model": MODEL, "max_tokens": 2, **fields}, timeout=5
            )
            assert answer.status_code == status, answer.text


async def code_of(here: Any, data: bytes) -> str:
    async with grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
        call = channel.unary_stream("/baton.v1.RouterService/Generate", bytes, bytes)
        try:
            [_ async for _ in call(data, timeout=5)]
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


@pytest.mark.parametrize("large", [False, True])
async def test_grpc(site: SiteMaker, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(sizes, "LARGE_BYTES", 16)
    tool = Tool(name="f", description=MARK)
    user = ChatMessage(role="user", content="hi")
    requests = (
        GenerateRequest(model=MODEL, text=MARK, max_tokens=2),
        GenerateRequest(model=MARK, text="a", max_tokens=2),
        GenerateRequest(model=MODEL, text="a", max_tokens=2, stop=[MARK]),
        GenerateRequest(
            model=MODEL, max_tokens=2, chat=ChatMessages(messages=[ChatMessage(role="user", content=MARK)])
        ),
        GenerateRequest(model=MODEL, max_tokens=2, chat=ChatMessages(messages=[user], tools=[tool])),
    )
    async with site() as here:
        for request in requests:
            for one in INVALID:
                padded = one.ljust(len(MARK), b"a")  # the length of a field stands before it
                if len(padded) == len(MARK):
                    data = request.SerializeToString().replace(MARK.encode(), padded)
                    assert await code_of(here, data) == "INVALID_ARGUMENT", (request, one)
        half = Tool(name="f", parameters=json.dumps({"type": "object", "title": "\ud800"}))
        chat = ChatMessages(messages=[user], tools=[half])
        data = GenerateRequest(model=MODEL, max_tokens=2, chat=chat).SerializeToString()
        assert await code_of(here, data) == "INVALID_ARGUMENT"
        await here.quiet()


def test_what_a_model_writes_is_sent() -> None:
    assert utf8(encode_with_lists({"a": "x\ud800y\ud83d"})) == b'{"a":"x?y?"}'
    assert utf8("é日😀") == "é日😀".encode()
