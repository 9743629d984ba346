"""The fields of tools in a chat: `tools`, `tool_choice`, `parallel_tool_calls`, and calls that are sent
back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from baton.base.errors import FieldError
from services.router.formats.openai.fields import Part
from services.router.tools.tool_use import Tool, ToolUse

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class FunctionBody(Part):
    """A function. `strict` has no effect: the arguments of a forced call always match their schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Part):
    """One tool of a request's `tools`."""

    type: Literal["function"]
    function: FunctionBody

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates take, without fields that were not set."""
        function = {name: value for name, value in vars(self.function).items() if value is not None}
        return {"type": self.type, "function": function}


def tool_use(
    tools: Sequence[ToolBody], choice: str | dict[str, Any] | None, *, parallel: bool
) -> ToolUse | None:
    """Returns the tools that the model may or must call; None if it is shown no tool. Raises FieldError."""
    found: dict[str, Tool] = {}
    for number, tool in enumerate(tools):
        name = tool.function.name
        if not _NAME.fullmatch(name):
            message = f"tools[{number}].function.name must be 1 to 64 letters, digits, and _.-"
            raise FieldError(message, param="tools")
        if name in found:
            raise FieldError(f"tools[{number}].function.name is that of another tool", param="tools")
        found[name] = Tool(name, _parameters(tool.function.parameters))
    if not found:
        if choice not in (None, "none", "auto"):
            raise FieldError("tool_choice needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    forced = _forced(found, choice)
    named = isinstance(choice, dict)
    return ToolUse(tuple(found.values()), forced, only_one=named or not parallel)


def calls_sent_back(number: int, calls: Sequence[object]) -> tuple[dict[str, Any], ...]:
    """An assistant message's calls; their arguments are as they were sent, mostly JSON in a string.
    `number`: the message's. Raises FieldError."""
    return tuple(_call(f"messages[{number}].tool_calls[{at}]", call) for at, call in enumerate(calls))


def _call(path: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str):
        raise FieldError(f"{path} must be a call of a function", param="messages")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str | dict):
        raise FieldError(f"{path}.function.arguments must be a string", param="messages")
    id_ = call.get("id")
    own = {"id": id_} if isinstance(id_, str) else {}
    return {**own, "type": "function", "function": {"name": name, "arguments": arguments}}


def _parameters(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a function's arguments; of one without any: an empty object."""
    return given or {"type": "object", "properties": {}, "additionalProperties": False}


def _forced(tools: Mapping[str, Tool], choice: str | dict[str, Any] | None) -> tuple[Tool, ...]:
    if choice is None or choice == "auto":
        return ()
    if choice == "required":
        return tuple(tools.values())
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        message = "tool_choice must be none, auto, required, or name a function"
        raise FieldError(message, param="tool_choice")
    if name not in tools:
        raise FieldError("tool_choice names a function that is not among the tools", param="tool_choice")
    return (tools[name],)
