"""/v1/completions as a client of the HTTP API sees it, streamed or whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.support.cluster import MODEL


@dataclass(slots=True)
class Choice:
    """One indexed output, put together where it came in chunks."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


@dataclass(slots=True)
class Completion:
    """One answer: its choices by index, and OpenAI's usage."""

    choices: dict[int, Choice]
    usage: dict[str, Any]

    @property
    def only(self) -> Choice:
        assert list(self.choices) == [0]
        return self.choices[0]


async def complete(
    client: httpx.AsyncClient, prompt: Any, *, stream: bool = False, **fields: Any
) -> Completion:
    """Asks for token ids and usage too, and checks what holds for every answer."""
    body = {"model": MODEL, "prompt": prompt, "return_token_ids": True, **fields}
    if stream:
        return await _streamed(client, {**body, "stream": True, "stream_options": {"include_usage": True}})
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = {
        choice["index"]: Choice(choice["token_ids"], choice["text"], choice["finish_reason"])
        for choice in answer["choices"]
    }
    assert list(choices) == list(range(len(answer["choices"])))
    return Completion(choices, answer["usage"])


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> Completion:
    completion = Completion({}, {})
    done = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if not line:
                continue
            assert not done, "something after [DONE]"
            data = line.removeprefix("data: ")
            assert data != line, f"not an event: {line!r}"
            if data == "[DONE]":
                done = True
            else:
                _add(completion, json.loads(data))
    assert done, "the stream ended without [DONE]"
    return completion


def _add(completion: Completion, chunk: dict[str, Any]) -> None:
    assert "error" not in chunk, chunk
    assert not completion.usage, "something after the usage"
    if not chunk["choices"]:
        completion.usage = chunk["usage"]
        return
    for part in chunk["choices"]:
        choice = completion.choices.setdefault(part["index"], Choice())
        assert choice.finish is None, "a chunk after the choice's last"
        choice.token_ids += part["token_ids"]
        choice.text += part["text"]
        choice.finish = part["finish_reason"]
