"""A request's grammar in llguidance's own terms."""

from __future__ import annotations

import re

from llguidance import LLMatcher, grammar_from

from baton.base.errors import BatonError, ErrorKind
from baton.v1.types_pb2 import Grammar
from services.common.grammar_text import literal, without_annotations

# White space between JSON tokens is optional, and bounded: with any number of blanks a sampled output need
# not end.
_WHITESPACE = " ?"
# A line of the grammar, with its number or, of a regex, indented; and the mark below it.
_EXCERPT = re.compile(r"\s+\d+ \||\s{4,}|\s+\^")
# Long words, an expression, and all but the beginning of a value are left out of a message.
_LONG = re.compile(r"\S{33,}|\((?:And|Or|Not|Literal|Concat) .*|(?<=, got .{32}).*")
_LONGEST_MESSAGE = 200


def grammar_source(grammar: Grammar) -> str:
    """The grammar as `LLMatcher` takes it. Raises BatonError(INVALID) where its text cannot be read;
    whether it compiles shows in the matcher."""
    kind = grammar.WhichOneof("kind")
    try:
        if kind == "json_schema":
            own = grammar.HasField("whitespace_pattern")
            pattern = grammar.whitespace_pattern if own else _WHITESPACE
            return LLMatcher.grammar_from_json_schema(
                without_annotations(grammar.json_schema), overrides={"whitespace_pattern": pattern}
            )
        if kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.regex)
        if kind == "choice":
            choices = " | ".join(map(literal, grammar.choice.choices))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        if kind == "grammar":
            return grammar_from("grammar", grammar.grammar)
    except ValueError as error:
        raise BatonError(ErrorKind.INVALID, f"{kind}: {one_line(str(error))}") from None
    raise BatonError(ErrorKind.INVALID, "the grammar is empty")


def one_line(text: str) -> str:
    """A message of the library in one line of bounded length: what is wrong, without the lines of the grammar
    in which it was found, nor long parts of it."""
    said = " ".join(" ".join(line for line in text.splitlines() if not _EXCERPT.match(line)).split())
    return _LONG.sub("…", said)[:_LONGEST_MESSAGE]
