"""Builds a GenerateRequest from the arguments of `generate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

from baton.base.errors import BatonError, ErrorKind
from baton.client.types import Message, Tool
from baton.request_fields.generated import RequestArguments
from baton.v1.router_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    TokenIds,
    ToolChoice,
)
from baton.v1.router_pb2 import ToolCall as ToolCallMessage
from baton.v1.types_pb2 import Choices, Grammar, LogitBias

_CHOICES = {
    "none": ToolChoice.TOOL_CHOICE_NONE,
    "auto": ToolChoice.TOOL_CHOICE_AUTO,
    "required": ToolChoice.TOOL_CHOICE_REQUIRED,
}
_GRAMMARS = ("json_schema", "regex", "choice", "grammar", "json_object")
# A text, token ids, or a conversation for the model's template.
Prompt = str | Sequence[int] | Sequence[Message]


class Sampling(RequestArguments, total=False):
    """Arguments of a request; the server chooses the default of those left out (see GenerateRequest)."""

    # What the output must match, one of these: a JSON schema (as a mapping, or its text), a regular
    # expression, one of some texts, a context-free grammar, any JSON object (False: anything).
    json_schema: str | Mapping[str, Any]
    regex: str
    choice: Sequence[str]
    grammar: str
    json_object: bool
    # With json_schema or json_object: a regular expression of the white space between JSON tokens.
    whitespace_pattern: str
    # For conversations: further variables of the model's chat template, and whether the prompt ends with the
    # beginning of an assistant's message.
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    # For conversations: what the model may call, and whether it must: "none", "auto", "required", or the name
    # of one of them.
    tools: Sequence[Tool]
    tool_choice: str
    parallel_tool_calls: bool
    # Text that the output is expected to contain, at most 16,384 tokens: drafts are taken from it.
    prediction: str


def to_request(model: str, prompt: Prompt, **sampling: Unpack[Sampling]) -> GenerateRequest:
    """The message. Raises BatonError(INVALID) where a value does not fit its field, which the error names."""
    fields: dict[str, Any] = dict(sampling)
    biases, stop = sampling.get("logit_bias", {}), sampling.get("stop", ())
    try:
        fields["logit_bias"] = [LogitBias(token_id=token, bias=bias) for token, bias in biases.items()]
        fields["grammar"] = _grammar(fields)
        fields["stop"] = [stop] if isinstance(stop, str) else list(stop)
        message = GenerateRequest(model=model, **_prompt(prompt))
        _add_template_fields(message, fields)
        _add_tools(message, fields)
    except (TypeError, ValueError) as error:
        raise BatonError(ErrorKind.INVALID, f"not a request: {error}") from error
    for name, value in fields.items():
        try:
            message.MergeFrom(GenerateRequest(**{name: value}))
        except (TypeError, ValueError) as error:
            raise BatonError(ErrorKind.INVALID, f"not a request: {name}: {error}") from error
    return message


def _grammar(fields: dict[str, Any]) -> Grammar | None:
    """Takes what the output must match out of the arguments. Raises ValueError where there is more than
    one."""
    given = {name: fields.pop(name) for name in _GRAMMARS if name in fields}
    space = fields.pop("whitespace_pattern", None)
    if not given:
        if space is not None:
            raise ValueError("whitespace_pattern needs json_schema or json_object")
        return None
    if len(given) > 1:
        raise ValueError(f"only one of {', '.join(given)} may be given")
    ((name, value),) = given.items()
    if name == "json_schema" and not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    if name == "choice":
        value = Choices(choices=value)
    return Grammar(whitespace_pattern=space, **{name: value})


def _add_template_fields(request: GenerateRequest, fields: dict[str, Any]) -> None:
    """Moves the arguments of the chat template to the request. Raises ValueError where the prompt is no
    conversation."""
    variables, begins = fields.pop("chat_template_kwargs", None), fields.pop("add_generation_prompt", None)
    if variables is None and begins is None:
        return
    if not request.HasField("chat"):
        raise ValueError("chat_template_kwargs and add_generation_prompt need messages")
    if variables:
        request.chat.chat_template_kwargs = json.dumps(variables, ensure_ascii=False)
    if begins is not None:
        request.chat.add_generation_prompt = begins


def _add_tools(request: GenerateRequest, fields: dict[str, Any]) -> None:
    """Takes the tools out of the arguments. Raises ValueError where the prompt is no conversation."""
    tools, choice = fields.pop("tools", ()), fields.pop("tool_choice", "auto")
    parallel = fields.pop("parallel_tool_calls", None)
    if not tools:
        return
    if not request.HasField("chat"):
        raise ValueError("tools need messages")
    chat = request.chat
    for tool in tools:
        parameters = "" if tool.parameters is None else json.dumps(tool.parameters, ensure_ascii=False)
        chat.tools.add(name=tool.name, description=tool.description, parameters=parameters)
    if choice in _CHOICES:
        chat.tool_choice = _CHOICES[choice]
    else:
        chat.tool_choice, chat.tool_name = ToolChoice.TOOL_CHOICE_NAMED, choice
    if parallel is not None:
        chat.parallel_tool_calls = parallel


class _PromptField(TypedDict, total=False):
    text: str
    token_ids: TokenIds
    chat: ChatMessages


def _prompt(prompt: Prompt) -> _PromptField:
    if isinstance(prompt, str):
        return {"text": prompt}
    if prompt and isinstance(prompt[0], Message):
        messages = cast("Sequence[Message]", prompt)
        return {"chat": ChatMessages(messages=map(_turn, messages))}
    return {"token_ids": TokenIds(ids=cast("Sequence[int]", prompt))}


def _turn(message: Message) -> ChatMessage:
    calls = [
        ToolCallMessage(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls
    ]
    return ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=calls,
        reasoning_content=message.reasoning,
    )
