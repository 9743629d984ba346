"""A conversation of the gRPC API, with its tools, as the HTTP API has it."""

from __future__ import annotations

from typing import Any

from baton.base.errors import FieldError
from baton.request_fields.table import MOST_ITEMS
from baton.v1.router_pb2 import ChatMessage, ChatMessages, Tool, ToolChoice
from services.router.formats.json_bodies import parse_json, parse_text
from services.router.formats.openai.tools import FunctionBody, ToolBody, calls_sent_back, tool_use
from services.router.request.request import Chat, ChatTurn
from services.router.request.sizes import too_many
from services.router.tools.tool_use import ToolUse


def chat_of(chat: ChatMessages) -> Chat:
    """The conversation. Raises FieldError where a tool is invalid."""
    turns = tuple(_turn(number, message) for number, message in enumerate(chat.messages))
    shown = chat.tool_choice != ToolChoice.TOOL_CHOICE_NONE
    return Chat(
        turns,
        add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
        tools=[tool.for_template() for tool in _tools(chat)] if shown else [],
        template_variables=_variables(chat.chat_template_kwargs),
    )


def tool_use_of(chat: ChatMessages) -> ToolUse | None:
    """Returns the tools that the model may or must call. Raises FieldError."""
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
    return tool_use(_tools(chat), _choice(chat), parallel=parallel)


def _variables(text: str) -> dict[str, object] | None:
    """Variables of the chat template. Raises FieldError where the text is not a JSON object, or they are too
    many."""
    if not text:
        return None
    try:
        variables = parse_json(text.encode())
    except FieldError:
        variables = None
    if not isinstance(variables, dict):
        raise FieldError("chat_template_kwargs must be a JSON object", param="chat_template_kwargs")
    if len(variables) > MOST_ITEMS["chat_template_kwargs"]:
        raise too_many("chat_template_kwargs")
    return variables


def _choice(chat: ChatMessages) -> str | dict[str, Any] | None:
    match chat.tool_choice:
        case ToolChoice.TOOL_CHOICE_NONE:
            return "none"
        case ToolChoice.TOOL_CHOICE_REQUIRED:
            return "required"
        case ToolChoice.TOOL_CHOICE_NAMED:
            return {"type": "function", "function": {"name": chat.tool_name}}
        case ToolChoice.TOOL_CHOICE_UNSPECIFIED | ToolChoice.TOOL_CHOICE_AUTO:
            return None
        case _:
            raise FieldError("tool_choice is unknown", param="tool_choice")


def _tools(chat: ChatMessages) -> list[ToolBody]:
    return [_tool(number, tool) for number, tool in enumerate(chat.tools)]


def _tool(number: int, tool: Tool) -> ToolBody:
    try:
        parameters = parse_text(tool.parameters) if tool.parameters else None
    except (ValueError, RecursionError):
        parameters = ()
    if not isinstance(parameters, dict | None):
        raise FieldError(f"tools[{number}].parameters must be a JSON object", param="tools")
    description = tool.description or None
    function = FunctionBody(name=tool.name, description=description, parameters=parameters)
    return ToolBody(type="function", function=function)


def _turn(number: int, message: ChatMessage) -> ChatTurn:
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return ChatTurn(
        message.role,
        message.content,
        message.name or None,
        message.tool_call_id or None,
        message.reasoning_content or None,
        calls_sent_back(number, calls) if calls else None,
    )
