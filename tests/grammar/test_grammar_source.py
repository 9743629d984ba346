"""Grammars in llguidance's terms: texts of any character, annotations, and messages without the grammar."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from baton.base.errors import BatonError
from baton.v1.types_pb2 import Choices, Grammar, Limits
from services.grammar.matcher import Matchers
from services.router.tools.families import FAMILIES, ToolFamily
from services.router.tools.tool_use import Tool, ToolUse
from tests.grammar.model import END_ID, allowed, bytes_ids, make_matchers, open_grammar

LIMITS = Limits(max_tokens=1 << 20, stop_token_ids=[END_ID])
COUNT = 0x110000 - 0x800  # of characters: all but surrogates
SECRET = "zanzibar"


@pytest.fixture(scope="module")
def matchers(tmp_path_factory: pytest.TempPathFactory) -> Matchers:
    return make_matchers(tmp_path_factory.mktemp("model"))


def check_writes(matchers: Matchers, grammar: Grammar, text: str) -> None:
    """Raises where the grammar does not allow this text as a whole."""
    sequence = open_grammar(matchers, grammar, LIMITS, bytes_ids(text))
    assert END_ID in allowed(sequence.mask())


def character(number: int) -> str:
    """The character of this number among those that are no surrogates."""
    return chr(number if number < 0xD800 else number + 0x800)


def some_characters() -> list[str]:
    """All below U+0300, whatever JSON, Lark or HTTP treat apart, and a few of the rest."""
    draw = random.Random(0)
    odd = "\u2028\u2029\ufeff\ufffe\uffff\ud7ff\ue000\U0010ffff\U0001f600"
    return [*map(chr, range(0x300)), *odd, *map(character, draw.sample(range(COUNT), 300))]


def choices_of(characters: Iterable[str], most: int) -> Iterator[list[str]]:
    """Lists of choices, each of a letter, up to 64 of the characters, and a letter."""
    texts, one = [], ""
    for character in characters:
        one += character
        if len(one) == 64:
            texts.append(f"a{one}b")
            one = ""
        if len(texts) == most:
            yield texts
            texts = []
    yield [*texts, f"a{one}b"]


def key_of(text: str) -> str:
    """A property's name as llguidance writes it."""
    return json.dumps(text, ensure_ascii=False)


def value_of(text: str) -> str:
    """A value as llguidance writes it, which escapes U+007F as well."""
    return key_of(text).replace("\x7f", "\\u007f")


def test_a_choice_may_have_any_character(matchers: Matchers) -> None:
    for texts in choices_of(some_characters(), 4):
        for text in texts:
            check_writes(matchers, Grammar(choice=Choices(choices=texts)), text)


@pytest.mark.slow
def test_a_choice_may_have_each_character(matchers: Matchers) -> None:
    tried = 0
    for texts in choices_of(map(character, range(COUNT)), 100):
        for text in texts:
            check_writes(matchers, Grammar(choice=Choices(choices=texts)), text)
            tried += len(text) - 2
    assert tried == COUNT


def test_schemas_may_have_any_character_wherever_there_is_a_text(matchers: Matchers) -> None:
    for (text,) in choices_of(some_characters(), 1):
        schema = {
            "type": "object",
            "description": text,
            "properties": {text: {"const": text}, "e": {"enum": [text, "z"]}},
            "required": [text, "e"],
            "additionalProperties": False,
        }
        document = f'{{{key_of(text)}: {value_of(text)}, "e": {value_of(text)}}}'
        check_writes(matchers, Grammar(json_schema=json.dumps(schema)), document)
        check_writes(matchers, Grammar(json_schema=json.dumps(schema, ensure_ascii=False)), document)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_tools_may_have_any_character_wherever_there_is_a_text(
    matchers: Matchers, family: ToolFamily
) -> None:
    for (text,) in choices_of(some_characters(), 1):
        parameters: dict[str, Any] = {
            "type": "object",
            "description": text,
            "properties": {text: {"const": text}},
            "required": [text],
            "additionalProperties": False,
        }
        tool = Tool("f", parameters)
        grammar = family.grammar(ToolUse((tool,), (tool,), only_one=True), {})
        arguments = f"{{{key_of(text)}: {value_of(text)}}}"
        named = f"f[ARGS]{arguments}"
        call = f'{{"name": "f", "{family.arguments}": {arguments}}}'
        whole = named if family.name == "mistral_v11" else call
        check_writes(matchers, grammar, f"{family.opening}{whole}{family.closing}")


def annotated() -> Iterator[dict[str, Any]]:
    """Schemas of a short string, with annotations and with keywords that constrain nothing."""
    formats = ("password", "binary", "uri-reference", "regex", "json-pointer", "", "a b", "日本", None)
    yield from ({"format": one} for one in formats)
    dialects = ("https://json-schema.org/draft-07/schema#", "http://json-schema.org/schema#", "x y", "")
    yield from ({"$schema": one} for one in dialects)
    yield {"uniqueItems": False, "propertyNames": {}, "dependentRequired": {}}


@pytest.mark.parametrize("annotations", list(annotated()), ids=str)
def test_annotations_constrain_nothing_wherever_they_stand(
    matchers: Matchers, annotations: dict[str, Any]
) -> None:
    one = {"type": "string", "maxLength": 3, **annotations}
    schemas = [
        (one, "ab"),
        ({"anyOf": [one, {"type": "null"}]}, "ab"),
        ({"type": "array", "items": one}, ["ab", "c"]),
        ({"$defs": {"format": one}, "$ref": "#/$defs/format"}, "ab"),
        ({"components": {"s": one}, "type": "array", "prefixItems": [{"$ref": "#/components/s"}]}, ["a"]),
        ({"type": "object", "properties": {"format": one}, "required": ["format"]}, {"format": "ab"}),
        ({"type": "object", "additionalProperties": one}, {"k": "ab"}),
        ({"type": "object", "properties": {"const": one}, "required": ["const"]}, {"const": "ab"}),
    ]
    for schema, document in schemas:
        check_writes(matchers, Grammar(json_schema=json.dumps(schema)), json.dumps(document))
        tool = Tool("f", {"type": "object", "properties": {"a": schema}, "required": ["a"]})
        if "$ref" not in json.dumps(schema):  # which is relative to the whole document
            grammar = FAMILIES["hermes"].grammar(ToolUse((tool,), (tool,), only_one=True), {})
            call = json.dumps({"name": "f", "arguments": {"a": document}})
            check_writes(matchers, grammar, f"<tool_call>\n{call}\n</tool_call>")
        assert tool.parameters["properties"]["a"] == schema, "the prompt shows tools as they are"


def test_data_that_looks_like_an_annotation_is_data(matchers: Matchers) -> None:
    for data in ({"format": "password"}, {"uniqueItems": False, "n": [{"format": "x"}]}):
        for schema in ({"const": data}, {"enum": [data, 1]}, {"properties": {"enum": {"const": data}}}):
            document = {"enum": data} if "properties" in schema else data
            check_writes(matchers, Grammar(json_schema=json.dumps(schema)), json.dumps(document))


def test_formats_that_are_known_are_enforced(matchers: Matchers) -> None:
    for name, good in [
        ("date", "2026-01-31"),
        ("time", "10:00:00Z"),
        ("date-time", "2026-01-31T10:00:00Z"),
        ("duration", "P3D"),
        ("email", "a@b.cd"),
        ("hostname", "a.b"),
        ("ipv4", "1.2.3.4"),
        ("ipv6", "::1"),
        ("uri", "http://a/b"),
        ("uuid", "01234567-89ab-cdef-0123-456789abcdef"),
    ]:
        grammar = Grammar(json_schema=json.dumps({"type": "string", "format": name}))
        check_writes(matchers, grammar, json.dumps(good))
        with pytest.raises(BatonError, match="outside the grammar"):
            check_writes(matchers, grammar, '"!"')


NESTED = {"type": "object", "properties": {SECRET * 9: {"type": "objec"}, "b": {"enum": [SECRET * 5]}}}
BROKEN = [
    Grammar(json_schema=json.dumps(NESTED)),
    Grammar(json_schema='{"type": "' + SECRET * 20),
    Grammar(json_schema=json.dumps({"allOf": [{"const": SECRET * 9}, {"const": SECRET * 8}]})),
    Grammar(json_schema=json.dumps({"type": "string", "pattern": f"({SECRET * 9}"})),
    Grammar(json_schema=json.dumps({"$ref": f"#/{SECRET * 9}"})),
    Grammar(regex=f"({SECRET * 9}"),
    Grammar(regex=f"[{SECRET * 9}\n"),
    Grammar(grammar=f"start: /{SECRET * 9}(/"),
    Grammar(grammar=f'start: "{SECRET * 9}" $$'),
    Grammar(grammar=f"start: a\na: {SECRET * 9}"),
    Grammar(grammar=f"root ::= {SECRET * 9} ("),
    Grammar(grammar='start: "x" %json ' + json.dumps(NESTED)),
]


@pytest.mark.parametrize("grammar", BROKEN, ids=range(len(BROKEN)))
def test_a_message_says_what_is_wrong_and_repeats_no_grammar(matchers: Matchers, grammar: Grammar) -> None:
    with pytest.raises(BatonError) as caught:
        open_grammar(matchers, grammar, LIMITS, ())
    message = caught.value.message
    assert "\n" not in message
    assert message.count(SECRET) <= 4, message
    assert len(message.removeprefix("the grammar cannot be used: ").replace(SECRET, "")) > 10, message
