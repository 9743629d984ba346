"""Renders a conversation with the model's own template, in a sandbox.

The environment is what such templates are written for: trimmed blocks, loop controls, a
`tojson` that keeps characters as they are, `strftime_now` for today's date, and `raise_exception` to
refuse a conversation.
"""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import BatonError, ErrorKind, FieldError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.router.request import Chat, ChatTurn


_LONGEST_REASON = 200
# What a client may not set through template variables: they have fields of their own, or are ours.
RESERVED = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now"})


class ChatTemplate:
    """A compiled template; `render` is pure and safe in a thread pool."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BatonError(ErrorKind.INVALID, f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat) -> str:
        """The prompt's text; FieldError(messages) where the template refuses it."""
        extra = dict(chat.template_variables or {})
        if taken := RESERVED.intersection(extra):
            raise FieldError(f"chat_template_kwargs must not set {min(taken)}", param="chat_template_kwargs")
        variables: dict[str, object] = {**self._special_tokens, **extra}
        variables["messages"] = [_message(turn) for turn in chat.turns]
        variables["add_generation_prompt"] = chat.add_generation_prompt
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            message = f"the chat template refuses these messages: {str(error)[:_LONGEST_REASON]}"
            raise FieldError(message, param="messages") from error
        except Exception as error:  # a template is a program: what it trips over came with the request
            message = f"the chat template fails on these messages: {type(error).__name__}"
            raise FieldError(message, param="messages") from error


def _message(turn: ChatTurn) -> dict[str, str]:
    message = {"role": turn.role, "content": turn.content}
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
