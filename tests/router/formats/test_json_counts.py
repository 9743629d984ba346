"""What is counted in a body's text agrees with what is counted in its document."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.base.errors import FieldError
from services.router.formats import json_counts
from services.router.formats.json_counts import check_counts
from services.router.request.sizes import check_document

CONTEXT = 300
# With what the text is judged by, in strings too.
_TEXTS = st.text(st.sampled_from('"\\[]{},: a\né'), max_size=6)
_VALUES = st.recursive(
    st.none() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)
# Fields with a bound, with items around it.
_BOUNDED = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.lists(_VALUES, min_size=14, max_size=18),
        "stop_token_ids": st.lists(st.integers(), min_size=6, max_size=10),
        "prompt": st.integers(CONTEXT - 2, CONTEXT + 2).map(lambda count: [1] * count),
        "messages": st.integers(CONTEXT - 2, CONTEXT + 2).map(lambda count: [{"content": "[,"}] * count),
        "input": st.lists(st.integers(0, 34).map(lambda count: dict.fromkeys(map(str, range(count)), "{")))
        | st.lists(_VALUES, max_size=40),
        "tools": st.lists(st.just({"a": [1, 2]}), min_size=127, max_size=129),
        "chat_template_kwargs": st.integers(127, 129).map(
            lambda count: dict.fromkeys(map(str, range(count)))
        ),
    },
)


def _of_an_older_python() -> ModuleType:
    """The module as Python 3.11.2 has it, which is Debian 12's."""
    spec = importlib.util.find_spec(json_counts.__name__)
    assert spec is not None
    assert spec.loader is not None
    older = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "version_info", (3, 11, 2)):
        spec.loader.exec_module(older)
    return older


OLDER = _of_an_older_python()


def refusal(check: Any, *arguments: object) -> tuple[str, str | None] | None:
    with contextlib.suppress(FieldError):
        check(*arguments)
        return None
    with pytest.raises(FieldError) as caught:
        check(*arguments)
    return caught.value.message, caught.value.param


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_TEXTS, _VALUES, max_size=3), _BOUNDED, st.sampled_from([None, 1]))
def test_agrees_with_the_document(odd: dict[str, Any], bounded: dict[str, Any], indent: int | None) -> None:
    for one in ({}, *({name: value} for name, value in bounded.items())):
        document = {**odd, **one, "after": 1}
        text = json.dumps(document, indent=indent, ensure_ascii=False).encode()
        expected = refusal(check_document, document, CONTEXT)
        assert refusal(check_counts, text, CONTEXT) == expected
        assert refusal(OLDER.check_counts, text, CONTEXT) == expected


def test_an_older_python_repeats_no_group_possessively() -> None:
    """There that matches what it should not, and may never end; else it is what saves memory."""
    possessive = re.compile(rb"\)(?:[*+?]|\{[0-9,]+\})\+")
    for name in ("_VALUE", "_REST", "_KEY", "_SMALL_MESSAGES"):
        assert not possessive.search(getattr(OLDER, name).pattern)
        assert bool(possessive.search(getattr(json_counts, name).pattern)) is (sys.version_info >= (3, 11, 5))


_SCHEMA = {"type": "object", "properties": {f"p{number}": {"enum": ["a"]} for number in range(4800)}}


@pytest.mark.parametrize("field", ["structured_outputs", "text"])
@pytest.mark.parametrize(
    "grammar",
    [{"json": _SCHEMA}, {"regex": "\\d\n" * 32_000}, {"regex": "\u00e9" * 65_000}, {"regex": '"' * 131_000}],
)
def test_a_grammar_of_the_largest_size_however_it_is_written(field: str, grammar: dict[str, Any]) -> None:
    """Several times as many of the same are refused."""
    for ensure_ascii in (True, False):
        for indent in (None, 8):
            text = json.dumps({field: grammar, "n": 1}, ensure_ascii=ensure_ascii, indent=indent)
            check_counts(text.encode(), CONTEXT)
    large = json.dumps({field: [grammar] * 9}).encode()
    assert refusal(check_counts, large, CONTEXT) == (f"{field} has more than 131072 bytes", field)


def test_reads_no_further_than_it_may() -> None:
    text = json.dumps({"prompt": "a" * 1000, "stop": ["b"] * 17}).encode()
    check_counts(text, CONTEXT, 1000)
    assert refusal(check_counts, text, CONTEXT, 2000) == ("stop: at most 16", "stop")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1, 2]",
        b'{"stop": [' + b"[" * 100_000,
        b'{"stop": ["' + b"a" * 100_000,
        b'{"stop"' + b"," * 100_000,
        b'{"a": ' + b"[" * 20 + b"]" * 20 + b', "stop": [1' + b",1" * 17 + b"]}",
        json.dumps({"stop": [1] * 17}).encode("utf-16"),
        json.dumps({"stop": [1] * 17}).encode("utf-16-be"),
        b'{"st\\u006fp": [1' + b",1" * 17 + b"]}",
    ],
)
def test_gives_up(text: bytes) -> None:
    """The parser of the document judges it."""
    check_counts(text, CONTEXT)
