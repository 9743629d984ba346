"""/v1/chat/completions, and the tokens of conversations."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.router.app import Router
from tests.router.conftest import MODEL, SiteMaker
from tests.router.fake_model import expected, logprobs_of
from tests.router.fake_workers import FakeCluster
from tests.router.http_client import http

HELLO = [{"role": "user", "content": "hi"}]
PROMPT = list(b"<user>hi\n<assistant>")


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO, "temperature": 0, "ignore_eos": True, **fields}
    return await client.post("/v1/chat/completions", json=body)


async def chunks_of(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await chat(client, stream=True, **fields)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_whole_response(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        body = (await chat(client, max_tokens=6, return_token_ids=True)).json()
        assert body["id"].startswith("chatcmpl-")
        assert (body["object"], body["model"]) == ("chat.completion", MODEL)
        (choice,) = body["choices"]
        assert choice["token_ids"] == expected(PROMPT, 6)
        message = choice["message"]
        assert (message["role"], message["refusal"]) == ("assistant", None)
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
        tokens = {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 6,
            "total_tokens": len(PROMPT) + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert body["usage"] == tokens
        text = {**HELLO[0], "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
        parts = (await chat(client, messages=[text], max_tokens=6, return_token_ids=True)).json()
        assert parts["choices"][0]["token_ids"] == expected(list(b"<user>h\ni\n<assistant>"), 6)
        short = (await chat(client, max_completion_tokens=2, max_tokens=9)).json()
        assert short["usage"]["completion_tokens"] == 2
        unset = (await chat(client)).json()["usage"]
        assert unset["total_tokens"] == 256  # all that the context has


async def test_a_stream(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        whole = (await chat(client, max_tokens=30, n=2)).json()
        options = {"stream_options": {"include_usage": True}}
        *chunks, last = await chunks_of(client, max_tokens=30, n=2, **options)
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        for index in (0, 1):
            mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert all(set(one["delta"]) == {"content"} for one in mine[1:-1])
            assert (mine[-1]["delta"], mine[-1]["finish_reason"]) == ({}, "length")
            assert all(one["finish_reason"] is None for one in mine[:-1])
            text = "".join(one["delta"]["content"] for one in mine[:-1])
            assert text == whole["choices"][index]["message"]["content"]
        assert all("usage" not in chunk for chunk in await chunks_of(client, max_tokens=3))


async def test_logprobs(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        fields = {"max_tokens": 20, "logprobs": True, "top_logprobs": 2}
        body = (await chat(client, **fields)).json()
        content = body["choices"][0]["logprobs"]["content"]
        assert body["choices"][0]["logprobs"]["refusal"] is None
        assert len(content) == 20
        for token, entry in zip(expected(PROMPT, 20), content, strict=True):
            assert entry["logprob"] == logprobs_of(token, 2).logprob
            assert entry["bytes"] == ([token] if token < 256 else entry["bytes"])
            assert [one["logprob"] for one in entry["top_logprobs"]] == [
                entry["logprob"],
                entry["logprob"] - 1,
            ]
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        streamed: list[Any] = []
        for chunk in await chunks_of(client, **fields):
            for choice in chunk["choices"]:
                streamed += (choice["logprobs"] or {}).get("content", [])
        assert streamed == content
        only = (await chat(client, max_tokens=2, logprobs=True)).json()["choices"][0]["logprobs"]
        assert [one["top_logprobs"] for one in only["content"]] == [[], []]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ({"messages": None}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"n": 0}, "n"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"prompt": "a"}, "prompt"),
    ({"stream_options": 5}, "stream_options"),
]


async def test_refusals(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        for fields, param in REFUSED:
            response = await chat(client, **fields)
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param), (fields, error)
        assert (await chat(client, model="other")).status_code == 404
        assert not here.worker("decode-0").decode.reserves


async def test_neutral_values_are_accepted(site: SiteMaker) -> None:
    neutral: dict[str, Any] = {
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "modalities": ["text"], "store": False, "metadata": {}, "service_tier": "auto", "user": "a",
        "logprobs": False, "top_logprobs": 0, "stream_options": None, "safety_identifier": "b",
    }  # fmt: skip
    answered: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    turns = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        *HELLO,
        answered,
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    async with site() as here, http(here) as client:
        assert (await chat(client, max_tokens=2, messages=turns, **neutral)).status_code == 200


async def test_template_variables(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        body = {"messages": HELLO, "add_generation_prompt": False}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        assert bytes(tokens) == b"<user>hi\n"
        body = {"messages": HELLO, "chat_template_kwargs": {"mood": "calm"}}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        assert bytes(tokens) == b"<user>hi\n[calm]<assistant>"


async def test_a_model_without_a_template(
    site: SiteMaker, model_folder: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in model_folder.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    make = Router.__init__

    def without(self: Router, config: Any) -> None:
        make(self, config.model_copy(update={"model": str(tmp_path)}))

    monkeypatch.setattr(Router, "__init__", without)
    workers = FakeCluster.like(tmp_path)
    monkeypatch.setattr(FakeCluster, "like", lambda folder: workers)
    async with site() as here, http(here) as client:
        response = await chat(client)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
