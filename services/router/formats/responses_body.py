"""POST /v1/responses: the request body."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, FailFast

from baton.errors import FieldError
from baton.v1.types_pb2 import Grammar
from services.router.formats.field_table import RESPONSES, FieldTable
from services.router.formats.grammar_fields import grammar_of_text_format
from services.router.formats.openai_fields import GenerationBody, Part
from services.router.request.request import Chat, ChatTurn, ParsedRequest

LOGPROBS = "message.output_text.logprobs"
# Of tools and reasoning, which no response has: nothing to include.
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


class InputItem(Part):
    """One item of the input. Only messages are supported; an earlier response's may be sent back."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    # A string or a list of text parts; `_turn` checks it.
    content: Any = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _FailFast(FailFast):
    """In a union, annotations are compared by their hash, which pydantic's own class lacks."""

    __hash__ = object.__hash__


# Validation ends at the first invalid item, as it does for messages.
Items = Annotated[list[InputItem], _FailFast()]


class TextConfig(Part):
    """What the output's text is like."""

    # `{"type": "json_schema", "name": …, "schema": …}`, or another type; `grammar` checks it.
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(GenerationBody):
    """The body of POST /v1/responses."""

    table: ClassVar[FieldTable] = RESPONSES
    nested: ClassVar[Mapping[str, type[BaseModel]]] = {
        **GenerationBody.nested,
        "input": InputItem,
        "text": TextConfig,
    }

    input: str | Items
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: list[Literal["message.output_text.logprobs"] | _EMPTY] | None = None
    text: TextConfig | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response has the tokens' logprobs."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def parsed_request(self) -> ParsedRequest:
        """Converts the body. An unset max_output_tokens means the rest of the context."""
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise _unsupported("text.verbosity is not supported yet", "text")
        parsed = self.sampling()
        names = {"prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        return dataclasses.replace(
            parsed,
            chat=Chat(self._turns(), template_variables=self.chat_template_kwargs, field_name="input"),
            max_tokens=self.max_output_tokens,
            fills_context=True,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            api_names={**parsed.api_names, **names},
        )

    def grammar(self) -> tuple[Grammar | None, str]:
        """What the output must match, if anything, and the field that says so."""
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
            turns = [_turn(number, item) for number, item in enumerate(self.input)]
        first = [ChatTurn("system", self.instructions)] if self.instructions and turns else []
        return (*first, *turns)


def _turn(number: int, item: InputItem) -> ChatTurn:
    if item.type not in (None, "message"):
        raise _unsupported(f"input[{number}]: only messages are supported yet", "input")
    if item.role is None:
        raise FieldError(f"input[{number}].role is required", param="input")
    content = item.content
    if isinstance(content, list):
        content = "\n".join(_part(number, part) for part in content)
    if not isinstance(content, str):
        message = f"input[{number}].content must be a string or a list of text parts"
        raise FieldError(message, param="input")
    return ChatTurn(item.role, content)


def _part(number: int, part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise FieldError(f"input[{number}].content: only text parts are supported", param="input")
    return text


def _unsupported(message: str, param: str) -> FieldError:
    return FieldError(message, param=param, code="unsupported_parameter")
