"""A request's grammar in llguidance's own terms."""

from __future__ import annotations

import json

from llguidance import LLMatcher, grammar_from

from baton.errors import BatonError, ErrorKind
from baton.v1.types_pb2 import Grammar

# White space between JSON tokens is optional, and bounded: with any number of blanks a sampled output need
# not end.
_WHITESPACE = " ?"


def grammar_source(grammar: Grammar) -> str:
    """The grammar as `LLMatcher` takes it. Raises BatonError(INVALID) where its text cannot be read;
    whether it compiles shows in the matcher."""
    kind = grammar.WhichOneof("kind")
    try:
        if kind == "json_schema":
            own = grammar.HasField("whitespace_pattern")
            pattern = grammar.whitespace_pattern if own else _WHITESPACE
            return LLMatcher.grammar_from_json_schema(
                grammar.json_schema, overrides={"whitespace_pattern": pattern}
            )
        if kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.regex)
        if kind == "choice":
            choices = (json.dumps(one, ensure_ascii=False) for one in grammar.choice.choices)
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
        if kind == "grammar":
            return grammar_from("grammar", grammar.grammar)
    except ValueError as error:
        raise BatonError(ErrorKind.INVALID, f"{kind}: {one_line(str(error))}") from None
    raise BatonError(ErrorKind.INVALID, "the grammar is empty")


def one_line(text: str, most: int = 300) -> str:
    """A message of the library in one line of bounded length."""
    return " ".join(text.split())[:most]
