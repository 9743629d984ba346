"""Fields that are only hints: none refuses a request, and usage may come with every chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.conftest import MODEL, SiteMaker
from tests.router.http_client import complete, events, http

# As GuideLLM 0.8.1 posts them.
GUIDELLM: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 12,
        "stop": None,
        "ignore_eos": True,
        "prompt": "hello",
    },
    "/v1/chat/completions": {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 12,
        "stop": None,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    },
}
HINTS: list[dict[str, Any]] = [
    {"stream_options": {"include_usage": True}},
    {"stream_options": {}},
    {"stream_options": {"include_obfuscation": True, "not_known_yet": [1]}},
    {"user": "a" * 2000},
    {"user": 5},
    {"metadata": {"run": "7"}},
    {"service_tier": "flex"},
    {"prompt_cache_key": "k"},
    {"prompt_cache_retention": "24h"},
    {"safety_identifier": "x"},
    {"prediction": {"type": "content", "content": "x"}},
    {"priority": 3},
    {"request_id": "mine"},
    {"prompt_cache_options": {"ttl": "30m"}},
    {"watermarking": False},
    {"stream_interval": 4},
    {"session_id": "s"},
]


@pytest.mark.parametrize("path", list(GUIDELLM))
async def test_what_guidellm_posts(site: SiteMaker, path: str) -> None:
    """Every chunk has the usage so far."""
    async with site() as here, http(here) as client:
        chunks: list[dict[str, Any]] = []
        async with client.stream("POST", path, json=GUIDELLM[path]) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line and line != "data: [DONE]":
                    chunks.append(json.loads(line.removeprefix("data: ")))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 12
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["prompt_tokens"] > 0
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert (chunks[-1]["choices"], len(chunks[0]["choices"])) == ([], 1)


async def test_usage_of_several_choices_adds_up(site: SiteMaker) -> None:
    options = {"stream_options": {"continuous_usage_stats": True}}
    async with site() as here, http(here) as client:
        chunks = [chunk async for chunk in events(client, n=3, max_tokens=5, **options)]
        assert all(chunk["choices"] for chunk in chunks)  # no chunk of usage alone: it was not asked for
        assert chunks[-1]["usage"]["completion_tokens"] == 15
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: next(iter(hint)))
async def test_a_hint_refuses_nothing(site: SiteMaker, hint: dict[str, Any]) -> None:
    async with site() as here, http(here) as client:
        assert (await complete(client, max_tokens=2, **hint)).status_code == 200
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **hint}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
