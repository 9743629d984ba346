"""Writes baton/request_fields/generated.py from the table: `python tools/request_types.py [FILE]`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from baton.request_fields.field import Kind, RequestField
from baton.request_fields.table import FIELDS, SAMPLING, VALUES

TYPES = Path(__file__).parents[1] / "baton" / "request_fields" / "generated.py"
_HEAD = '''"""Types made from the table of request fields by tools/request_types.py: do not edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict
'''
_SCALARS = {Kind.FLOAT: "float", Kind.INTEGER: "int", Kind.FLAG: "bool"}
# Types of the client's arguments.
_ARGUMENTS = {
    **_SCALARS,
    Kind.STOP: "str | Sequence[str]",
    Kind.TOKEN_IDS: "Sequence[int]",
    Kind.BIASES: "Mapping[int, float]",
    Kind.LOGPROBS: "int",
}
# What an engine is given of sampling parameters that are no scalars: type and default.
_PARAMS = {Kind.BIASES: "tuple[tuple[int, float], ...] = ()", Kind.LOGPROBS: "int | None = None"}


def types() -> str:
    """The text of the module."""
    classes = (
        (
            "class RequestArguments(TypedDict, total=False):",
            "Arguments that the client sends as they are; the server chooses the default of those left out.",
            _arguments(),
        ),
        (
            "@dataclass(frozen=True, kw_only=True)\nclass RequestValues:",
            "Numbers and flags of a request, whatever the API, as the client sent them; None means unset.",
            (f"    {field.name}: {_SCALARS[field.kind]} | None = None\n" for field in VALUES),
        ),
        (
            "@dataclass(frozen=True, slots=True)\nclass SamplingValues:",
            "The sampling parameters that an engine is given; each default changes nothing.",
            (f"    {field.name}: {_param(field)}\n" for field in SAMPLING),
        ),
    )
    return _HEAD + "".join(f'\n\n{head}\n    """{doc}"""\n\n{"".join(body)}' for head, doc, body in classes)


def _arguments() -> Iterator[str]:
    for field in FIELDS:
        if field.wire is not None and field.kind in _ARGUMENTS:
            yield textwrap.fill(field.meaning, 110, initial_indent="    # ", subsequent_indent="    # ")
            yield f"\n    {field.name}: {_ARGUMENTS[field.kind]}\n"


def _param(field: RequestField) -> str:
    if field.kind in _PARAMS:
        return _PARAMS[field.kind]
    unused = field.unused or 0
    return f"float = {float(unused)}" if field.kind is Kind.FLOAT else f"int = {int(unused)}"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else TYPES).write_text(types(), "utf-8")
