"""Renders conversations with the model's chat template, as `transformers` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from baton.base.errors import BatonError, ErrorKind, FieldError
from services.router.request.request import Chat, ChatTurn
from services.router.text.control_tokens import ControlTokens, Marks, cut, strings_of
from services.router.text.render_budget import TooExpensiveError, check_output
from services.router.text.template_environment import TemplateEnvironment

_LONGEST_REASON = 200
# Variables that a client must not set: those with fields of their own, the environment's, special tokens.
RESERVED = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token",
        "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
        "additional_special_tokens",
    }
)  # fmt: skip

# What a template is given, by name.
Variables = Mapping[str, Any]


class ChatTemplate:
    """A compiled template. `render` is thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control: ControlTokens | None = None,
        name: str = "default",
    ) -> None:
        """`special_tokens`: variables that the model defines. `control`: what client text must not become.
        `name`: the template's among the model's."""
        self._environment = TemplateEnvironment()
        try:
            self._template = self._environment.compiled(source)
        except (jinja2.TemplateError, RecursionError) as error:
            message = f"the model's chat template {name!r} is broken: {error}"
            raise BatonError(ErrorKind.INVALID, message) from error
        self._source = source
        self._name = name
        self._special_tokens = dict(special_tokens)
        self._reserved = RESERVED | self._special_tokens.keys()
        self._control = control or ControlTokens(())

    def render(self, chat: Chat) -> list[str]:
        """The prompt's text, in parts that must be tokenised separately: a single one, unless the client's
        strings spell control tokens. FieldError if the template refuses the conversation, or takes too long
        or too much memory to render it."""
        self._environment.begin()
        try:
            given, text = self._rendered(chat)
            sent = _strings(given)
            spellings = self._control.found_in(sent)
            return self._parts(given, text, sent, spellings) if spellings else [text]
        except FieldError:
            raise
        except Exception as error:  # a template is a program, which failed on this conversation
            raise FieldError(self._reason(error), param=chat.field_name) from error
        finally:
            self._environment.end()

    def _rendered(self, chat: Chat) -> tuple[Variables, str]:
        """The conversation as the template takes it, and the text that it makes of it.

        Some templates write the arguments of calls as they are, others as JSON: where the template renders
        both a text and an object, it is given the one that is JSON in the prompt.
        """
        given = self._given(chat, _parsed)
        sent = [arguments for turn in chat.turns for arguments in _arguments(turn)]
        if not sent:
            return given, self._write(given)
        try:
            text = self._write(given)
        except TooExpensiveError:
            raise
        except Exception:  # a program, which failed on these values
            given = self._given(chat, _as_sent)
            return given, self._write(given)
        if _has_json(text, map(_parsed, sent)):
            return given, text
        try:
            as_sent = self._given(chat, _as_sent)
            other = self._write(as_sent)
        except TooExpensiveError:
            raise
        except Exception:
            return given, text
        return (as_sent, other) if all(_as_sent(one) in other for one in sent) else (given, text)

    def _given(self, chat: Chat, form: Callable[[object], object]) -> Variables:
        """The variables of the conversation. `form`: of the arguments of calls."""
        given = dict(chat.template_variables or {})
        if taken := self._reserved.intersection(given):
            raise FieldError(f"chat_template_kwargs must not set {min(taken)}", param="chat_template_kwargs")
        variables = {"tools": list(chat.tools) or None, "documents": None, **given}
        messages = [_message(turn, form) for turn in chat.turns]
        return {**variables, "messages": messages, "add_generation_prompt": chat.add_generation_prompt}

    def _parts(self, given: Variables, text: str, sent: str, spellings: Sequence[str]) -> list[str]:
        """The text, cut within each spelling of a control token that the template did not write. `sent`: the
        client's strings."""
        marks = Marks(spellings, text + self._source + sent)
        try:
            unmarked, places = marks.unmark(self._write(_marked(marks, given)))
        except TooExpensiveError:
            raise
        except Exception:
            unmarked = None
        if unmarked == text:
            return cut(text, places)
        # The template looks at what it is given. Its own control tokens are marked instead.
        own_marks, template = self._with_marks
        same, own_places = own_marks.unmark(self._write(given, template))
        if same == text:
            return cut(text, sorted({*marks.places(text)}.difference(own_places)))
        if unmarked is None:
            raise jinja2.TemplateError("they spell control tokens of the model")
        return cut(unmarked, places)

    @cached_property
    def _with_marks(self) -> tuple[Marks, jinja2.Template]:
        """The template with marks in the control tokens that it writes."""
        marks = Marks(self._control.all(), self._source + "".join(self._special_tokens.values()))
        return marks, self._environment.compiled(self._source, marks.mark, self._special_tokens)

    def _write(self, given: Variables, template: jinja2.Template | None = None) -> str:
        return _text(template or self._template, {**self._special_tokens, **given})

    def _reason(self, error: Exception) -> str:
        """Says why the conversation is refused. Never with its text."""
        name = f"the chat template {self._name!r}"
        if isinstance(error, TooExpensiveError):
            return f"{name} {error} on these messages"
        if isinstance(error, jinja2.TemplateError):
            return f"{name} refuses these messages: {str(error)[:_LONGEST_REASON]}"
        return f"{name} fails on these messages: {type(error).__name__}"


def _text(template: jinja2.Template, variables: Variables) -> str:
    """Renders a template. Raises TooExpensiveError once the text is too long."""
    pieces, size = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        check_output(size)
    text = "".join(pieces)
    if not text.isascii():
        check_output(len(text.encode(errors="replace")))
    return text


def _strings(given: Variables) -> str:
    """All of the client's strings."""
    try:
        return "\0".join(strings_of(given))
    except RecursionError:
        message = "chat_template_kwargs is nested too deeply"
        raise FieldError(message, param="chat_template_kwargs") from None


def _marked(marks: Marks, given: Variables) -> Variables:
    marked = marks.mark_all(given)
    assert isinstance(marked, dict)
    return marked


def _message(turn: ChatTurn, form: Callable[[object], object]) -> dict[str, object]:
    """A message as templates take it. Those of some models have their reasoning under another name."""
    message = {name: value for name, value in vars(turn).items() if value is not None}
    if turn.tool_calls is not None:
        message["tool_calls"] = [_call(call, form) for call in turn.tool_calls]
    if turn.reasoning_content is not None:
        message = {"thinking": turn.reasoning_content, **message}
    return message


def _call(call: Mapping[str, Any], form: Callable[[object], object]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": form(function["arguments"])}}


def _arguments(turn: ChatTurn) -> Iterable[object]:
    return (call["function"]["arguments"] for call in turn.tool_calls or ())  # type: ignore[index]


def _parsed(arguments: object) -> object:
    """Arguments as an object; as they are where they are none, as a model may have written them."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
        if "\\u" in arguments:
            json.dumps(parsed, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_sent(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _has_json(text: str, values: Iterable[object]) -> bool:
    """True if each object is in the text as JSON, however that is spaced, sorted and escaped."""
    squeezed = "".join(text.split())
    return all(
        any("".join(form.split()) in squeezed for form in _forms(value))
        for value in values
        if isinstance(value, dict)
    )


def _forms(value: object) -> Iterator[str]:
    for ascii_only in (False, True):
        for in_order in (False, True):
            yield json.dumps(value, ensure_ascii=ascii_only, sort_keys=in_order)
