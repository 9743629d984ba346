"""POST /v1/responses: the request body."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel

from baton.base.errors import FieldError
from baton.request_fields.field import Endpoint
from baton.v1.types_pb2 import Grammar
from services.router.formats.field_table import RESPONSES, FieldTable
from services.router.formats.grammar_fields import grammar_of_text_format
from services.router.formats.openai.fields import FailFast, GenerationBody, Integer, Part, with_fields_of
from services.router.formats.openai.tools import FunctionBody, ToolBody, tool_use
from services.router.request.request import Chat, ChatTurn, ParsedRequest

LOGPROBS = "message.output_text.logprobs"
# Values of `include` for tools and reasoning that no response has: nothing to include.
_EMPTY = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


class FunctionTool(Part):
    """A function that the model may call. `strict` has no effect: forced calls always match their schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_in_a_chat(self) -> ToolBody:
        """Returns the tool in the form of a chat's `tools`."""
        function = FunctionBody(name=self.name, description=self.description, parameters=self.parameters)
        return ToolBody(type=self.type, function=function)

    def echo(self) -> dict[str, Any]:
        """Returns the tool in the form in which a response repeats it."""
        return dict(vars(self))


class InputItem(Part):
    """One item of the input: a message, a call or its result. Those of earlier responses may be sent back;
    their reasoning is not shown to the model again."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    # A string or a list of text parts; `_turn` checks it.
    content: Any = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    # Items that are tool calls or their results.
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Any = None
    # Items that are reasoning.
    summary: Any = None
    encrypted_content: Any = None


Items = Annotated[list[InputItem], FailFast()]


class TextConfig(Part):
    """Format and verbosity of the output's text."""

    # `{"type": "json_schema", "name": …, "schema": …}`, or another type; `grammar` checks it.
    format: dict[str, Any] | None = None
    verbosity: str | None = None


@with_fields_of(Endpoint.RESPONSES)
class ResponsesBody(GenerationBody):
    """The body of POST /v1/responses."""

    table: ClassVar[FieldTable] = RESPONSES
    nested: ClassVar[Mapping[str, type[BaseModel]]] = {
        **GenerationBody.nested,
        "input": InputItem,
        "text": TextConfig,
        "tools": FunctionTool,
    }

    input: str | Items
    instructions: str | None = None
    # The response repeats these two.
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Integer | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"] | _EMPTY], FailFast()] | None = None
    text: TextConfig | None = None
    top_logprobs: Integer | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None

    @property
    def is_to_be_stored(self) -> bool:
        """True if the response is stored, by a router that stores responses."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """True if the response has the tokens' logprobs."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def parsed_request(self) -> ParsedRequest:
        """Converts the body. An unset max_output_tokens means the rest of the context."""
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise _unsupported("text.verbosity is not supported yet", "text")
        common = self.common()
        common["api_names"] |= {
            "prompt": "input",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
        }
        tools = [tool.as_in_a_chat() for tool in self.tools or ()]
        shown = [] if self.tool_choice == "none" else [tool.for_template() for tool in tools]
        chat = Chat(
            self._turns(),
            template_variables=self.chat_template_kwargs,
            tools=shown,
            field_name="input",
        )
        return ParsedRequest(
            **common,
            chat=chat,
            max_tokens=self.max_output_tokens,
            fills_context=True,
            structured=True,
            tools=tool_use(tools, self._tool_choice(), parallel=self.parallel_tool_calls is not False),
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
        )

    def _tool_choice(self) -> str | dict[str, Any] | None:
        """Returns the choice in a chat's form: the function's name in an object of its own."""
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        return choice

    def grammar(self) -> tuple[Grammar | None, str]:
        """Returns the grammar that the output must match, if any, and the field that states it."""
        own = grammar_of_text_format(self.text.format if self.text is not None else None)
        other, field = super().grammar()
        if own is not None and other is not None:
            raise FieldError(f"text.format and {field} cannot be combined", param=field)
        return (other, field) if own is None else (own, "text")

    def _turns(self) -> tuple[ChatTurn, ...]:
        """The conversation: the instructions, then the input."""
        if isinstance(self.input, str):
            turns = [ChatTurn("user", self.input)] if self.input else []
        else:
            turns = _turns(self.input)
        first = [ChatTurn("system", self.instructions)] if self.instructions and turns else []
        return (*first, *turns)


def _turns(items: Sequence[InputItem]) -> list[ChatTurn]:
    """The messages of a conversation. Calls that follow one another, or a text of the model, are one
    message."""
    turns: list[ChatTurn] = []
    # The calls of each, by its place.
    calls: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for number, item in enumerate(items):
        match item.type:
            case None | "message":
                turns.append(_message(number, item))
            case "function_call":
                call = _call(number, item)
                if not turns or turns[-1].role != "assistant":
                    turns.append(ChatTurn("assistant", ""))
                calls[len(turns) - 1].append(call)
            case "function_call_output":
                if item.call_id is None:
                    raise FieldError(f"input[{number}].call_id is required", param="input")
                text = _text(number, "output", item.output)
                turns.append(ChatTurn("tool", text, tool_call_id=item.call_id))
            case "reasoning":
                pass
            case _:
                raise _unsupported(f"input[{number}]: items of this type are not supported yet", "input")
    for place, own in calls.items():
        turns[place] = dataclasses.replace(turns[place], tool_calls=tuple(own))
    return turns


def _message(number: int, item: InputItem) -> ChatTurn:
    if item.role is None:
        raise FieldError(f"input[{number}].role is required", param="input")
    return ChatTurn(item.role, _text(number, "content", item.content, refuses=item.role == "assistant"))


def _call(number: int, item: InputItem) -> dict[str, Any]:
    """Returns a call in the form that an assistant message of a chat has."""
    if item.call_id is None or item.name is None or item.arguments is None:
        raise FieldError(f"input[{number}] needs call_id, name and arguments", param="input")
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _text(number: int, name: str, content: object, *, refuses: bool = False) -> str:
    """The text of a message or result. `refuses`: its parts may be refusals."""
    if isinstance(content, list):
        content = "\n".join(_part(number, part, refuses=refuses) for part in content)
    if not isinstance(content, str):
        raise FieldError(f"input[{number}].{name} must be a string or a list of text parts", param="input")
    return content


def _part(number: int, part: object, *, refuses: bool) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else None
    if refuses and isinstance(part, dict) and part.get("type") == "refusal":
        text = part.get("refusal")
    if not isinstance(text, str):
        raise FieldError(f"input[{number}].content: only text parts are supported", param="input")
    return text


def _unsupported(message: str, param: str) -> FieldError:
    return FieldError(message, param=param, code="unsupported_parameter")
