"""A body that is nested deeply is served or refused, wherever the nesting is: no later step fails on it."""

from __future__ import annotations

import json

import httpx
import pytest

from baton.base.errors import FieldError
from services.router.formats.json_bodies import MOST_LEVELS, parse_json
from tests.router.conftest import MODEL, SiteMaker

SOME = (250, 300, 943, 985)
MESSAGES = '"messages":[{"role":"user","content":"x"}]'
# What Python's parser takes depends on the stack's depth: one step or other has its limit at each of these.
DEPTHS = [SOME, pytest.param(range(880, 1000), marks=pytest.mark.slow)]


def nested(depth: int) -> str:
    return '{"a":' * depth + "{}" + "}" * depth


def bodies(depth: int) -> dict[str, tuple[str, str]]:
    """Name → path, and the body's fields."""
    deep, chat, response = nested(depth), "/v1/chat/completions", "/v1/responses"
    tool = f'"tools":[{{"type":"function","name":"f","parameters":{deep}}}]'
    in_chat = f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{deep}}}}}]'
    schema = f'{{"type":"json_schema","name":"x","schema":{deep}}}'
    call = f'{{"type":"function_call","call_id":"1","name":"f","arguments":{json.dumps(deep)}}}'
    return {
        "tools of a response": (response, f'"input":"x","max_output_tokens":2,{tool}'),
        "tools of a stream": (response, f'"stream":true,"input":"x","max_output_tokens":2,{tool}'),
        "format of a response": (response, f'"input":"x","max_output_tokens":2,"text":{{"format":{schema}}}'),
        "a call of a response": (
            response,
            f'"max_output_tokens":2,"input":[{{"role":"user","content":"x"}},{call}]',
        ),
        "tools of a chat": (chat, f'{MESSAGES},"max_tokens":2,{in_chat}'),
        "forced tools": (chat, f'{MESSAGES},"max_tokens":2,"tool_choice":"required",{in_chat}'),
        "a schema": (chat, f'{MESSAGES},"max_tokens":2,"guided_json":{deep}'),
        "a schema as text": (chat, f'{MESSAGES},"max_tokens":2,"guided_json":{json.dumps(deep)}'),
        "variables": (chat, f'{MESSAGES},"max_tokens":2,"chat_template_kwargs":{{"mood":{deep}}}'),
        "an undocumented field": (chat, f'{MESSAGES},"max_tokens":2,"odd":{deep}'),
    }


@pytest.mark.parametrize("depths", DEPTHS)
async def test_deep_bodies(site: SiteMaker, depths: range | tuple[int, ...]) -> None:
    wrong = []
    async with site(tool_calls="qwen3_coder") as here:
        url = f"http://{here.addresses['http']}"
        async with httpx.AsyncClient(base_url=url, headers={"content-type": "application/json"}) as http:
            for depth in depths:
                for name, (path, fields) in bodies(depth).items():
                    answer = await http.post(path, content=f'{{"model":"{MODEL}",{fields}}}'.encode())
                    if answer.status_code not in (200, 400) or '"error":{' in answer.text[20:]:
                        wrong.append((name, depth, answer.status_code, answer.text[:200]))
    assert not wrong


def test_the_bound_on_levels() -> None:
    for opening, closing in (('{"a":', "}"), ("[", "]"), ("[{}, ", "]")):
        parse_json((opening * (MOST_LEVELS - 1) + "[]" + closing * (MOST_LEVELS - 1)).encode())
        with pytest.raises(FieldError):
            parse_json((opening * MOST_LEVELS + "[]" + closing * MOST_LEVELS).encode())
    parse_json(b"[" + b"[]," * 10_000 + b"1]")
