"""Conversations of clients, and what `transformers` makes of them with a template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from services.router.formats.openai.chat import ChatBody
from services.router.request.request import Chat

Message = dict[str, Any]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wärme <b>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer", "enum": [1, 2]},
            },
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
LIST = {
    "type": "function",
    "function": {
        "name": "list",
        "description": "many",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "array", "items": {"type": "string"}},
                "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    },
}
TOOLS: tuple[list[Message] | None, ...] = (None, [WEATHER], [WEATHER, NOW, LIST])


def called(arguments: str, name: str = "weather", id_: str = "call12345") -> Message:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


_HI = {"role": "user", "content": "Hi"}


def _result(content: str, id_: str = "call12345") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": id_}


def _calling(*calls: Message, content: str = "", **more: str) -> Message:
    return {"role": "assistant", "content": content, **more, "tool_calls": [*calls]}


CONVERSATIONS: tuple[list[Message], ...] = (
    [_HI],
    [{"role": "system", "content": "Be brief."}, _HI],
    [{"role": "developer", "content": "Obey"}, _HI],
    [_HI, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "  spaces \n"}],
    [_HI, _calling(called('{"city": "Bern"}')), _result("sunny")],
    [
        _HI,
        _calling(
            called('{"city":"Zürich","days":2}'), called("{}", "now", "call12346"), content="Let me see"
        ),
        _result('{"t": 1}'),
        _result("12:00", "call12346"),
        {"role": "assistant", "content": "done"},
        _HI,
    ],
    [_HI, {"role": "assistant", "content": "<think>\nplan\n</think>\n\nanswer"}, _HI],
    [_HI, {"role": "assistant", "content": "answer", "reasoning_content": "plan"}, _HI],
    [_HI, _calling(called('{"a": ["x", "y"], "o": null}', "list"), reasoning_content="plan"), _result("[]")],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    [
        {"role": "user", "content": "quote ' \" \\ <|x|> {{ x }} é 日本 😀\u2028"},
        {"role": "assistant", "content": "ok"},
        _HI,
    ],
    [
        {"role": "user", "content": "Who?", "name": "bob"},
        {"role": "assistant", "content": "you\n\n"},
        {"role": "user", "content": ""},
    ],
)


def chat(messages: Sequence[Message], tools: Sequence[Message] | None = None) -> Chat:
    """The conversation as it comes out of a body of the API."""
    body = {"model": "m", "messages": [*messages], **({"tools": [*tools]} if tools else {})}
    return ChatBody.parse(body).chat()


def rendered_by_transformers(
    source: str,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    form: Callable[[str], object] = str,
    **more: object,
) -> str | None:
    """The prompt; None where the template fails. `form`: of the arguments of calls."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template(
            [[_plain(message, form) for message in messages]],
            tools=None if tools is None else [*tools],
            chat_template=source,
            add_generation_prompt=True,
            **SPECIAL,
            **more,
        )
    except Exception:
        return None
    return str(texts[0])


def allowed_prompts(
    source: str, messages: Sequence[Message], tools: Sequence[Message] | None
) -> tuple[str, ...]:
    """The prompts that are right: with the arguments of calls as objects or as strings, where only one of the
    two renders; where both do, the one that has them as JSON. Empty where the template fails."""
    as_object = rendered_by_transformers(source, messages, tools, json.loads)
    as_text = rendered_by_transformers(source, messages, tools)
    if as_object is None or as_text is None:
        return tuple(one for one in (as_object, as_text) if one is not None)
    having = tuple(one for one in (as_object, as_text) if _has_arguments(one, messages))
    return having or (as_object,)


def _has_arguments(prompt: str, messages: Sequence[Message]) -> bool:
    """True if each call's arguments can be read from the prompt as JSON."""
    decoder, found = json.JSONDecoder(), []
    for place, character in enumerate(prompt):
        if character == "{":
            try:
                found.append(decoder.raw_decode(prompt, place)[0])
            except ValueError:
                continue
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return all(json.loads(call["function"]["arguments"]) in found for call in calls)


def _plain(message: Message, form: Callable[[str], object]) -> Message:
    plain = dict(message)
    if isinstance(plain["content"], list):
        plain["content"] = "\n".join(part["text"] for part in plain["content"])
    if "tool_calls" in plain:
        plain["tool_calls"] = [_as(call, form) for call in plain["tool_calls"]]
    return plain


def _as(call: Message, form: Callable[[str], object]) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": form(function["arguments"])}}
