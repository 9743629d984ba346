"""Outputs of models that may call tools, for each family: good calls, bad ones, text that quotes both.

Made by a seed. Each output says which calls an answer has to have, whatever else it is made of.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.router.tools.families import ToolFamily
from services.router.tools.tool_use import Tool, ToolUse

STRINGS = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
TYPED = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "list": {"type": "array"},
        "any": {"$ref": "#/$defs/any"},
    },
    "$defs": {"any": {"anyOf": [{"type": "object"}, {"type": "null"}, {"$ref": "#/$defs/any"}]}},
}
USE = ToolUse((Tool("edit", STRINGS), Tool("find.all-1", TYPED), Tool("now", {"type": "object"})))
Call = tuple[str, dict[str, Any]]
# Texts that a string argument may have: some look like markup, which in JSON is quoted.
STRINGS_OF_ARGUMENTS = (
    *(
        "",
        "Bern",
        'Zü"rich{[\\',
        "a </tool_call> } b",
        "[TOOL_CALLS][{",
        "mkdir -p test/{a,b",
        "line\nline \n",
    ),
    *("😀\u2028", "[ARGS]{}", "\\u00e", '{"name": "now", "parameters": {}}; '),
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
)
PROSE = (
    *("I will look.", "So:\n\n", "{ not a call }", "<tool> or <tool_cal", "if a < b: x[0] = {}\n", "'\""),
    *("see [TOOL] and [ARGS]", "</tool_call>", "a\n\n\nb", "I write <tool_call> now.", " " * 40 + "far"),
    *("Tags are <function=name> and <parameter=x>.", "[TOOL_CALLS] means that I call."),
    "[TOOL_CALLS] [none of these]",
)
# Objects that are no calls.
BAD = (
    *('{"name": "nope", "KEY": {}}', '{"name": "nope", "KEY": {"name": "now", "KEY": {}}}', '{["now"]: 1}'),
    *('{"name": ["now"], "KEY": {}}', '{"name": {"a": 1}, "KEY": {}}', '{"name": 1, "KEY": {}}', "{}"),
    *('{"name": null}', '{"KEY": {}}', '{"name": weather}', '{"name" "now"}', '{"name": "now", "KEY": [1]}'),
    *('{"name": "now", "KEY": 3}', '{"name": "now", "KEY": "[1]"}', '{"name": "now", "KEY": "{"}'),
    *('{"name": "edit\n', '{"name": "now", "KEY"}', '{"name": "now",}', "{'name': 'now'}"),
    *('{"name": "now" "KEY": {}}', '{"name": 1' + "0" * 5000 + "}", '{"name": "' + "now" * 900 + '"}'),
    '{"name": "now", "KEY": "{\\"a\\": \\"\\ud800\\"}"}',
)
# Without a marker for each call, what is not closed takes what follows with it.
UNCLOSED = ('{"name": [[[', '{"name": ' + "[" * 3000, '{"x": [[["')
# Calls that break within their arguments.
BROKEN = (
    *(
        '{"path": Bern}',
        '{"path": "Bern}\n}',
        '{"path": "a\\x"}',
        '{"path": ["a"}',
        '{"path" "a"}',
        "{path: 1}",
    ),
    *('{"path": "a",}', '{"path": True}', '{"a": 01}', '{"a": 1' + "0" * 900 + "}", "{'path': 'a'}"),
    '{"a": ' + "[" * 300 + "}",
)
BAD_NAMED = (
    *("nope[ARGS]{}", "now[ARGS][1]", "now[ARGS]3", "now and then", "[ARGS]{}", "f" * 100, 'now[ARGS]"{}"'),
    *("now[CALL_ID]" + "x" * 200, "now[ARGS]nullable", "[" * 3000, "now["),
)
BAD_TAGGED = (
    *("<tool_call>\n<function=nope>\n</function>\n</tool_call>", "<tool_call>\n<func f>", "<function=>"),
    *("A tag <function=" + "f" * 100, "Write <function=now> here.", "<function=now", "<tool_call>{}"),
    *("<tool_call>\n<function=now>\n</parameter>", "<function=edit><parameter=" + "k" * 2000),
    "<tool_call>\n<tool_call>nothing",
)
BROKEN_TAGGED = (
    "<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\nor so",
    "<function=edit><parameter=path>a</parameter>{}",
    "<function=edit><parameter=path>a</parameter><parameter=" + "k" * 2000,
)


@dataclass(frozen=True)
class Output:
    """`calls`: those that are good, in order. `texts`: parts that are content as they are, in order."""

    text: str
    calls: tuple[Call, ...]
    texts: tuple[str, ...]


def outputs_of(family: ToolFamily, count: int, seed: int) -> list[Output]:
    """Outputs of a family's models."""
    draw = random.Random(f"{family.name} {seed}")
    return [_output(family, draw) for _ in range(count)]


# What texts of markup are made of.
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<function=", "</function>"),
    *("<parameter=", "</parameter>", "<|python_tag|>", "now", "edit", "nope", ">", "<", "[", "]", "{", "}"),
    *(
        '"',
        '"',
        '"name"',
        '"arguments"',
        '"parameters"',
        ":",
        ",",
        ";",
        "\n",
        " ",
        "\\",
        "null",
        "1",
        "-1.5e3",
    ),
    *("x", " " * 20, "\n" * 30, "\\u00e4", "\\ud800", "now[ARGS]{}", "<function=now>", "<parameter=path>"),
    *('{"name": "now", "arguments": {}}', '{"name": "edit", "parameters": {"path": "a"}}', '{"a": ["b"]}'),
)


def noise(draw: random.Random) -> str:
    """A text of markup in any order."""
    return "".join(draw.choice(FRAGMENTS) for _ in range(draw.randint(1, 25)))


def cuts_of(text: str, draw: random.Random, count: int | None) -> Iterator[list[str]]:
    """Ways to cut a text: into single characters, into pieces, and in two at some or all places."""
    yield list(text) or [""]
    for most in (3, 9):
        parts, rest = [], text
        while rest:
            size = draw.randint(1, most)
            parts.append(rest[:size])
            rest = rest[size:]
        yield parts or [""]
    places: Sequence[int] = range(1, len(text))
    if count is not None and len(places) > count:
        places = sorted(draw.sample(places, count))
    for place in places:
        yield [text[:place], text[place:]]


def _output(family: ToolFamily, draw: random.Random) -> Output:
    return _MAKERS[family.name](draw).output()


def _arguments(draw: random.Random, name: str) -> dict[str, Any]:
    if name == "now":
        return {}

    def text() -> str:
        return draw.choice(STRINGS_OF_ARGUMENTS)

    if name == "edit":
        return {key: text() for key in draw.sample(["path", "text"], draw.randint(0, 2))}
    every = {
        "path": text(),
        "count": draw.randint(-9, 10**9),
        "list": [1, [text()], {"a": None, "name": "now", "arguments": {}}],
        "any": draw.choice([None, {}, {"name": "now", "arguments": {"x": text()}}]),
    }
    return {key: every[key] for key in draw.sample(sorted(every), draw.randint(0, 4))}


class _Json:
    """Calls in tags, as hermes writes them."""

    opening, closing, key = "<tool_call>\n", "\n</tool_call>", "arguments"
    unclosed: tuple[str, ...] = UNCLOSED

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def output(self) -> Output:
        """A few parts, each a call, a bad one or text."""
        parts: list[str] = []
        calls: list[Call] = []
        texts: list[str] = []
        for _ in range(self.draw.randint(1, 5)):
            kind = self.draw.random()
            if kind < 0.45:
                name, arguments, text = self.good()
                calls.append((name, arguments))
                parts.append(text)
            elif kind < 0.75:
                text = self.bad()
                texts.append(text.strip())
                parts.append(text)
            elif kind < 0.85:
                parts.append(self.broken())
            else:
                text = self.draw.choice(PROSE)
                texts.append(text.strip())
                parts.append(text)
        return Output(self.between(parts), tuple(calls), tuple(texts))

    def between(self, parts: list[str]) -> str:
        """The parts in a row."""
        return "".join(part + self.draw.choice(["\n", "\n\n", "\n \n"]) for part in parts)

    def good(self) -> tuple[str, dict[str, Any], str]:
        """A call that an answer has to have: its name, arguments and text."""
        name = self.draw.choice(["edit", "find.all-1", "now"])
        arguments = _arguments(self.draw, name)
        return name, arguments, self.around(self.written(name, arguments))

    def around(self, call: str) -> str:
        """A call between its markers."""
        return (
            self.draw.choice([self.opening, self.opening.strip(), self.opening + " \n"]) + call + self.closing
        )

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        """A good call in one of the ways in which models write it."""
        indent = self.draw.choice([None, 1])
        text = json.dumps(arguments, ensure_ascii=self.draw.random() < 0.3, indent=indent)
        forms = [f'{{"name": "{name}", "{self.key}": {text}}}'] * 3
        forms.append(f'{{"{self.key}": {text}, "name": "{name}"}}')
        forms.append(
            f'{{"type": "function", "id": "1", "name": "{name}", "{self.key}": {text}, "x": [null]}}'
        )
        forms.append(f'{{"name":"{name}","{self.key}":{json.dumps(text)}}}')
        if not arguments:
            forms += [f'{{"name": "{name}"}}', f'{{"name": "{name}", "{self.key}": null}}']
        return self.draw.choice(forms)

    def bad(self) -> str:
        """A call that is none."""
        return self.around(self.draw.choice(BAD + self.unclosed).replace("KEY", self.key))

    def broken(self) -> str:
        """A call that breaks within its arguments."""
        return self.around(f'{{"name": "edit", "{self.key}": {self.draw.choice(BROKEN)}}}')


class _Bare(_Json):
    """Calls that an output begins with: llama3."""

    opening = closing = ""
    unclosed = ()
    key = "parameters"

    def around(self, call: str) -> str:
        return call

    def output(self) -> Output:
        """Calls, bad ones too, then text."""
        calls: list[Call] = []
        texts: list[str] = []
        parts: list[str] = []
        for _ in range(self.draw.randint(1, 4)):
            kind = self.draw.random()
            if kind < 0.6:
                name, arguments, text = self.good()
                calls.append((name, arguments))
            elif kind < 0.85:
                text = self.bad()
                texts.append(text.strip())
            else:
                text = self.broken()
            parts.append(text)
        begin = self.draw.choice(["", "\n", "<|python_tag|>", " <|python_tag|> "])
        text = begin + self.draw.choice(["; ", ";\n", "\n", ", "]).join(parts)
        if self.draw.random() < 0.3:
            prose = 'Then {"name": "now", "parameters": {}} is quoted.'
            return Output(f"{text}\n\nSo. {prose}", tuple(calls), (*texts, prose))
        return Output(text, tuple(calls), tuple(texts))


class _Listed(_Bare):
    """Calls in a list: mistral."""

    key = "arguments"

    def output(self) -> Output:
        """Text, then a list of calls, maybe text behind it."""
        inner = super().output()
        before = self.draw.choice(["", "So: ", "[TOOL_CALLS] is a marker.\n"])
        bracket = self.draw.choice(["[", " [ ", "[\n"])
        marked = inner.text.removeprefix("\n").replace("<|python_tag|>", "").strip()
        return Output(
            f"{before}[TOOL_CALLS]{bracket}{marked}]",
            inner.calls,
            (*((before.strip(),) if before else ()), *inner.texts),
        )


class _Named(_Json):
    """A name and an object: mistral_v11."""

    def output(self) -> Output:
        return _Listed(self.draw).output() if self.draw.random() < 0.25 else super().output()

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        text = json.dumps(arguments, ensure_ascii=self.draw.random() < 0.3)
        mark = self.draw.choice(["[ARGS]", "[ARGS] ", "", "[CALL_ID]a1b2c3d4e[ARGS]"])
        nothing = not arguments and mark and self.draw.random() < 0.5
        return f"{name}{mark}{'null' if nothing else text}"

    def around(self, call: str) -> str:
        return f"[TOOL_CALLS]{call}"

    def bad(self) -> str:
        return self.around(self.draw.choice(BAD_NAMED))

    def broken(self) -> str:
        return self.around(f"edit[ARGS]{self.draw.choice(BROKEN)}")


class _Tagged(_Json):
    """Tags: qwen3_coder. Models leave some of them out."""

    def good(self) -> tuple[str, dict[str, Any], str]:
        name, arguments, text = super().good()
        # In tags a value that has a tag ends there.
        clean = {key: value for key, value in arguments.items() if "tool_call>" not in json.dumps(value)}
        return name, clean, text if clean == arguments else self.around(self.written(name, clean))

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        left_out = self.draw.random() < 0.4
        text = f"<function={name}>\n"
        for key, value in arguments.items():
            end = "" if left_out and self.draw.random() < 0.5 else "</parameter>\n"
            shown = value if isinstance(value, str) else json.dumps(value)
            text += f"<parameter={key}>\n{shown}\n{end}"
        return text + ("" if left_out and self.draw.random() < 0.5 else "</function>")

    def around(self, call: str) -> str:
        opening = "" if call.startswith("<function=") and self.draw.random() < 0.2 else self.opening
        return f"{opening}{call.removesuffix(self.closing[0])}{self.closing}"

    def bad(self) -> str:
        return self.draw.choice(BAD_TAGGED)

    def broken(self) -> str:
        return self.draw.choice(BROKEN_TAGGED)


_MAKERS: dict[str, type[_Json]] = {
    "hermes": _Json,
    "llama3": _Bare,
    "mistral": _Listed,
    "mistral_v11": _Named,
    "qwen3_coder": _Tagged,
}
