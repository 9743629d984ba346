"""Renders conversations with the model's chat template, in a Jinja sandbox.

The environment is the one that such templates are written for: trimmed blocks, loop controls, a `tojson` that
does not escape characters, `strftime_now`, and `raise_exception` to refuse a conversation.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import BatonError, ErrorKind, FieldError
from services.router.request.request import Chat
from services.router.text.control_tokens import ControlTokens, cut, strings_of, unused_separator

_LONGEST_REASON = 200
# Variables that a client must not set: those with fields of their own, the environment's, special tokens.
RESERVED = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token",
        "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
        "additional_special_tokens",
    }
)  # fmt: skip


class ChatTemplate:
    """A compiled template. `render` is thread-safe."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], control: ControlTokens | None = None
    ) -> None:
        """`special_tokens`: variables that the model defines. `control`: what client text must not become."""
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
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._reserved = RESERVED | self._special_tokens.keys()
        self._control = control or ControlTokens(())

    def render(self, chat: Chat) -> list[str]:
        """The prompt's text, in parts that must be tokenised separately: a single one, unless the client's
        strings spell control tokens. FieldError if the template refuses the conversation."""
        given: dict[str, object] = dict(chat.template_variables or {})
        if taken := self._reserved.intersection(given):
            raise FieldError(f"chat_template_kwargs must not set {min(taken)}", param="chat_template_kwargs")
        given["messages"] = [
            {name: value for name, value in vars(turn).items() if value is not None} for turn in chat.turns
        ]
        if chat.tools:
            given["tools"] = list(chat.tools)
        try:
            text = "\0".join(strings_of(given))
            spellings = self._control.found_in(text)
            if not spellings:
                return [self._write(given, chat)]
            separator = unused_separator(text + self._source)
            given = {name: cut(value, spellings, separator) for name, value in given.items()}
        except RecursionError:
            message = "chat_template_kwargs is nested too deeply"
            raise FieldError(message, param="chat_template_kwargs") from None
        return [part for part in self._write(given, chat).split(separator) if part]

    def _write(self, given: Mapping[str, object], chat: Chat) -> str:
        variables = {**self._special_tokens, **given, "add_generation_prompt": chat.add_generation_prompt}
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            message = f"the chat template refuses these messages: {str(error)[:_LONGEST_REASON]}"
            raise FieldError(message, param=chat.field_name) from error
        except Exception as error:  # a template is a program, which failed on this request's values
            message = f"the chat template fails on these messages: {type(error).__name__}"
            raise FieldError(message, param=chat.field_name) from error


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
