"""Calls of every family in outputs that come in pieces of any size."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import pytest

from services.router.tools.families import (
    FAMILIES,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_V11,
    QWEN3_CODER,
    Syntax,
    ToolFamily,
    detect,
)
from services.router.tools.output_parser import OutputParser, OutputStructure
from services.router.tools.parameter_types import types_of_tools
from services.router.tools.pieces import CallArguments, CallBegin, CallEnd, Content, Reasoning

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"items": {}},
        "unit": {"$ref": "#/$defs/unit"},
        "n": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "": {"type": ["object", "string"]},
        "a": {"type": "integer"},
    },
    "$defs": {"unit": {"enum": ["°C }\n", "K"]}},
}
TOOLS = types_of_tools({"f": SCHEMA, "g.h-1": SCHEMA})
ARGUMENTS: dict[str, object] = {
    "city": 'Zü"rich{[\\',
    "days": [1, 2, {"a": None}],
    "unit": "°C }\n",
    "n": -1.5e3,
    "": {},
}


class Found:
    """The parsed parts of an output, put together."""

    def __init__(self, structure: OutputStructure, parts: list[str]) -> None:
        self.content = self.reasoning = ""
        self.calls: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.closed: list[int] = []
        parser = OutputParser(structure)
        for number, part in enumerate(parts):
            for piece in parser.push(part, last=number == len(parts) - 1):
                match piece:
                    case Content(text):
                        self.content += text
                    case Reasoning(text):
                        self.reasoning += text
                    case CallBegin(index, id_, name):
                        assert index == len(self.calls)
                        self.calls.append((name, ""))
                        self.ids.append(id_)
                    case CallArguments(index, text):
                        name, before = self.calls[index]
                        assert index == len(self.calls) - 1, "arguments of an earlier call"
                        self.calls[index] = name, before + text
                    case CallEnd(index):
                        self.closed.append(index)
        assert parser.closed_calls == len(self.closed)

    @property
    def all(self) -> tuple[object, ...]:
        """Everything that an answer says of it."""
        return self.content, self.reasoning, self.calls, self.closed


def found(family: ToolFamily | None, text: str, *, reasoning: bool = False, within: bool = False) -> Found:
    """The same however the text is cut."""
    structure = OutputStructure(family, TOOLS, reasoning, within)
    whole = Found(structure, [text])
    draw = random.Random(len(text))
    for most in (1, 2, 5, 40):
        parts, rest = [], text
        while rest:
            count = draw.randint(1, most)
            parts.append(rest[:count])
            rest = rest[count:]
        cut = Found(structure, parts or [""])
        assert cut.all == whole.all, most
    return whole


def tagged(name: str, arguments: Mapping[str, object]) -> str:
    """A call as Qwen3-Coder's chat template writes it."""
    values = [
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    ]
    return f"<function={name}>\n{''.join(values)}</function>"


def text_of(family: ToolFamily, name: str, arguments: Mapping[str, object]) -> str:
    match family.syntax:
        case Syntax.TAGS:
            return tagged(name, arguments)
        case Syntax.NAMED:
            return f"{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"
        case Syntax.JSON:
            return json.dumps({"name": name, family.arguments: arguments}, ensure_ascii=False)


def written(family: ToolFamily, *calls: tuple[str, Mapping[str, object]]) -> str:
    """Calls as models of the family write them."""
    texts = [text_of(family, name, arguments) for name, arguments in calls]
    if family.each:
        return family.separator.join(f"{family.opening}{text}{family.closing}" for text in texts)
    return family.opening + family.separator.join(texts) + family.closing


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_one_call_and_several(family: ToolFamily) -> None:
    several: list[list[tuple[str, dict[str, object]]]] = [
        [("f", ARGUMENTS)],
        [("f", {}), ("g.h-1", ARGUMENTS), ("f", {"a": 1})],
    ]
    for calls in several:
        one = found(family, written(family, *calls))
        assert [(name, json.loads(text)) for name, text in one.calls] == calls
        assert one.content == ""
        assert len(set(one.ids)) == len(calls)
        assert all(len(id_) == 9 for id_ in one.ids) is family.short_ids


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello.",
        " a <tool b",
        "see [TOOL] and {braces} {",
        "line\n\nline \n",
        "<",
        "x\n<tool_call",
        "<|python",
    ],
)
def test_text_without_calls_is_unchanged(family: ToolFamily, text: str) -> None:
    one = found(family, text)
    assert (one.content, one.calls) == (text, [])


def test_text_before_and_between_calls() -> None:
    call = written(HERMES, ("f", {"a": 1}))
    one = found(HERMES, f"I will look.\n\n{call}\nAnd then:\n{call}\n\n")
    assert one.content == "I will look.\nAnd then:"
    assert one.calls == [("f", '{"a": 1}')] * 2
    one = found(MISTRAL, 'So: [TOOL_CALLS] [ {"name": "f", "arguments": {"a": 1}} ] ')
    assert (one.content, one.calls) == ("So:", [("f", '{"a": 1}')])


def test_other_ways_to_write_a_call() -> None:
    assert found(HERMES, '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>').calls == [
        ("f", '{"a":1}')
    ]
    assert found(
        LLAMA3, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": true}}'
    ).calls == [("f", '{"a": true}')]
    assert found(HERMES, '<tool_call>\n{"name": "f"}\n</tool_call>').calls == [("f", "{}")]
    assert found(HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>').calls == [
        ("f", '{"a": 1}')
    ]
    assert found(MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {}}').calls == [("f", "{}")]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (HERMES, "<tool_call>\nnothing\n</tool_call>"),
        (HERMES, '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": 5}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
        (LLAMA3, '{"name": "Bob", "parameters": {}}'),
        (HERMES, "<tool_call>\n{name: f}"),
        (LLAMA3, '{"colour": "red", "n": [1, 2]}'),
        (LLAMA3, '{"a": 1} and {"name": "f"}'),
        (MISTRAL, "[TOOL_CALLS] I could not"),
        (MISTRAL_V11, "[TOOL_CALLS] I could not"),
        (MISTRAL_V11, "[TOOL_CALLS]other[ARGS]{}"),
        (MISTRAL_V11, "[TOOL_CALLS]" + "f" * 100),
        (MISTRAL_V11, "[TOOL_CALLS]f"),
        (MISTRAL_V11, "[TOOL_CALLS][ARGS]{}"),
        (MISTRAL_V11, "[TOOL_CALLS] [none of these]"),
        (MISTRAL_V11, '[TOOL_CALLS][{"name": "other", "arguments": {}}]'),
        (QWEN3_CODER, "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
        (QWEN3_CODER, "<tool_call>\n<func f>"),
        (QWEN3_CODER, "A tag <function=" + "f" * 100),
        (QWEN3_CODER, "Write <function=name> here."),
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_text(family: ToolFamily, text: str) -> None:
    one = found(family, text)
    assert one.calls == []
    assert "".join(one.content.split()) == "".join(text.split())


def test_a_name_and_an_object() -> None:
    for between in ("[ARGS]", "", " [ARGS] ", "[CALL_ID]a1B2c3D4e[ARGS]", "[CALL_ID]a1B2c3D4e"):
        one = found(MISTRAL_V11, f'So:\n[TOOL_CALLS]f{between}{{"a": "}}"}}[TOOL_CALLS]g.h-1{between}{{}}\n')
        assert (one.content, one.calls) == ("So:", [("f", '{"a": "}"}'), ("g.h-1", "{}")])
    assert found(MISTRAL_V11, '[TOOL_CALLS]f[ARGS]{"a": [').calls == [("f", '{"a": [')]
    for text in ("[TOOL_CALLS]f[ARGS] none", f"[TOOL_CALLS]f[CALL_ID]{'x' * 200}", "[TOOL_CALLS]f[ARGS]"):
        one = found(MISTRAL_V11, text)
        assert (one.content, one.calls) == (text, [])
    one = found(MISTRAL_V11, "[TOOL_CALLS]f[ARGS]null[TOOL_CALLS]f[ARGS][TOOL_CALLS]g.h-1[ARGS] null")
    assert one.calls == [("f", "{}"), ("f", "{}"), ("g.h-1", "{}")]


def test_the_later_mistral_family_accepts_the_earlier_form() -> None:
    several: list[tuple[str, dict[str, object]]] = [("f", ARGUMENTS), ("g.h-1", {}), ("f", {"a": 1})]
    one = found(MISTRAL_V11, f"So: {written(MISTRAL, *several)} Done.")
    assert [(name, json.loads(text)) for name, text in one.calls] == several
    assert one.content == "So: Done."
    assert all(len(id_) == 9 for id_ in one.ids)
    assert found(MISTRAL_V11, '[TOOL_CALLS] [ {"name": "f"} ]').calls == [("f", "{}")]
    assert found(MISTRAL_V11, '[TOOL_CALLS]{"name": "f", "arguments": {}}').calls == [("f", "{}")]
    both = written(MISTRAL, ("f", {"a": 1})) + written(MISTRAL_V11, ("g.h-1", {"a": 2}), ("f", {"a": 3}))
    assert found(MISTRAL_V11, both).calls == [("f", '{"a": 1}'), ("g.h-1", '{"a": 2}'), ("f", '{"a": 3}')]
    one = found(MISTRAL_V11, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "other"}]')
    assert (one.content, one.calls) == (', {"name": "other"}', [("f", "{}")])


def test_arguments_of_the_earlier_form_are_streamed() -> None:
    parser = OutputParser(OutputStructure(MISTRAL_V11, TOOLS))
    (begin, *rest) = parser.push('[TOOL_CALLS][{"name": "f", "arguments": {"city": "Zü', last=False)
    assert isinstance(begin, CallBegin)
    assert (begin.name, rest) == ("f", [CallArguments(0, '{"city": "Zü')])
    assert parser.push("rich", last=False) == [CallArguments(0, "rich")]
    assert parser.push('"}}]', last=True) == [CallArguments(0, '"}'), CallEnd(0)]


def test_tags_of_a_function_and_its_parameters() -> None:
    code = 'if a < b:\n\n    print("</parameter", "</functions>")\n\n'
    body = f"<function=f><parameter=city>\n{code}\n</parameter><parameter=a>7</parameter>\n</function>"
    for text in (f"Look.\n<tool_call>{body}</tool_call>", f"Look.\n{body}", f"Look. {body}\n</tool_call>\n"):
        one = found(QWEN3_CODER, text)
        ((name, arguments),) = one.calls
        assert (one.content, name, json.loads(arguments)) == ("Look.", "f", {"city": code, "a": 7})
    two = "<tool_call>\n" + tagged("f", {"a": 1}) + tagged("g.h-1", {"city": ""}) + "\n</tool_call>"
    assert found(QWEN3_CODER, two).calls == [("f", '{"a": 1}'), ("g.h-1", '{"city": ""}')]
    # A call that was forced.
    assert found(QWEN3_CODER, written(HERMES, ("f", {"a": 1}))).calls == [("f", '{"a": 1}')]
    one = found(QWEN3_CODER, "<function=f><parameter=a>1</parameter> or so")
    assert (one.content, one.calls, one.closed) == (" or so", [("f", '{"a": 1')], [])
    one = found(QWEN3_CODER, "<function=f><parameter=city>\nZürich\n</para")
    assert (one.content, one.calls) == ("", [("f", '{"city": "Zürich')])


def test_strings_between_tags_are_passed_on_as_they_are_written() -> None:
    parser = OutputParser(OutputStructure(QWEN3_CODER, TOOLS))
    parser.push("<tool_call>\n<function=f>\n<parameter=city>\nLine", last=False)
    assert parser.push(' "1"\nLine 2\n', last=False) == [CallArguments(0, ' \\"1\\"\\nLine 2')]


def test_a_call_that_is_cut_off() -> None:
    one = found(HERMES, '<tool_call>\n{"name": "f", "arguments": {"city": "Zür')
    assert one.calls == [("f", '{"city": "Zür')]
    assert one.content == ""
    assert one.closed == []
    for text in (
        '<tool_call>{"name": "f" "arguments": {}}',
        '<tool_call>\n{"na',
        '<tool_call>\n{"name": "f"',
    ):
        one = found(HERMES, text)
        assert (one.calls, one.content) == ([], text)


def test_reasoning_before_text_and_calls() -> None:
    call = written(HERMES, ("f", {"a": 1}))
    one = found(HERMES, f"<think>\nI need f.\n</think>\n\nOne moment. {call}", reasoning=True)
    assert (one.reasoning, one.content) == ("I need f.", "One moment.")
    assert one.calls == [("f", '{"a": 1}')]
    one = found(None, "so\n\nit is </think> 4 <think>", reasoning=True, within=True)
    assert (one.reasoning, one.content) == ("so\n\nit is", "4 <think>")
    one = found(None, "<think>cut </thin", reasoning=True)
    assert (one.reasoning, one.content) == ("cut </thin", "")
    for text in ("4", " <thinking> 4", "", "<thi"):
        one = found(None, text, reasoning=True)
        assert (one.reasoning, one.content) == ("", text)


def test_reasoning_is_not_searched_for_calls() -> None:
    call = written(HERMES, ("f", {}))
    one = found(HERMES, f"<think>{call}</think>no", reasoning=True)
    assert (one.calls, one.content, one.reasoning) == ([], "no", call)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ('{%- if tools %}<tools>…</tools> <tool_call>\\n{\\"name\\": …}</tool_call>', HERMES),
        ('{{ "[TOOL_CALLS] [" }}', MISTRAL),
        ('{{ "<|python_tag|>" + tool_call.name }}', LLAMA3),
        (
            'Respond in the format {"name": function name, "parameters": dictionary} ipython "parameters": ',
            LLAMA3,
        ),
        ("{{ '<tool_call>\\n<function=' + name }}", QWEN3_CODER),
        ("{{ '<tool_call>' + name + '<arg_key>' }}", None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", MISTRAL_V11),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_family_is_known_by_its_template(template: str | None, family: ToolFamily | None) -> None:
    assert detect(template) is family
