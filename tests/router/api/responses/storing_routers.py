"""Routers that store responses in a Redis of their own, and OpenAI's client of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from baton.state.embedded import EmbeddedServer
from tests.router.conftest import MODEL, Site

KEY = "5a" * 32
# A conversation with a call and its result.
CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "Warm?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "12"},
]


def storing(server: EmbeddedServer, **limits: Any) -> dict[str, Any]:
    """Settings of a router that stores responses there."""
    state = {"redis_url": server.url, "namespace": "ours", "journal_key": KEY, "embedded": True}
    return {"state": state, "stored_responses": {"ttl_s": 60, **limits}}


@asynccontextmanager
async def client_of(here: Site, key: str = "unused") -> AsyncIterator[Any]:
    base = f"http://{here.addresses['http']}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
        yield client


async def create(client: Any, text: Any, **fields: Any) -> Any:
    asked = {"model": MODEL, "input": text, "temperature": 0, "max_output_tokens": 4, **fields}
    return await client.responses.create(**asked)


def prompt_of(here: Site) -> str:
    return bytes(here.worker("prefill-0").prefill.prompts[-1]).decode()


def responses_of(here: Site) -> Any:
    return here.router.store.responses
