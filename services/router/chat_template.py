"""Renders a conversation with the model's own template, in a sandbox.

The environment is what such templates are written for: trimmed blocks, loop controls, a
`tojson` that keeps characters as they are, and `raise_exception` to refuse a conversation.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import BatonError, ErrorKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.router.request import ChatTurn


class ChatTemplate:
    """A compiled template; `render` is pure and safe in a thread pool."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BatonError(ErrorKind.INVALID, f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatTurn]) -> str:
        """The prompt's text, ready for the assistant's answer; BatonError(INVALID) if refused."""
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            message = f"the chat template refuses these messages: {error}"
            raise BatonError(ErrorKind.INVALID, message) from error


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
