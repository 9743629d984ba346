"""Writes the tables of docs/fields.md from the code: `python tools/fields_page.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path

from baton.request_fields.field import Bounds, RequestField, Treatment
from baton.request_fields.table import FIELDS
from services.grammar.compile_process import CPU_S, MEMORY_BYTES
from services.grammar.launch import STACK_BYTES
from services.router.formats.field_table import TABLES, Field, FieldTable
from services.router.request.bounds import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_RULES, MAX_TOOLS

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"
_WORDS = {Treatment.USED: "used", Treatment.NO_EFFECT: "no effect", Treatment.REFUSED: "refused"}


def with_tables(page: str) -> str:
    """The page with the text between the marks of each table replaced by the table."""
    tables = {"fields": _table(), "used fields": _used(), "bounds of grammars": _bounds()}
    for name, table in tables.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        page = before + begin + table + end + after
    return page


def _bounds() -> str:
    rows = [
        ("bytes of a grammar, or of all schemas and names of forced tools", f"{MAX_GRAMMAR_BYTES:,}"),
        ("choices", f"{MAX_CHOICES:,}"),
        ("rules of Lark or GBNF", f"{MAX_RULES:,}"),
        ("tools", f"{MAX_TOOLS:,}"),
        ("processor time to compile it and to compute its first mask", f"{CPU_S} s"),
        ("memory that this takes", f"{MEMORY_BYTES >> 20} MiB"),
        ("stack that this takes, such as for nesting", f"{STACK_BYTES >> 20} MiB"),
    ]
    return "\n".join(["| | at most |", "|---|---|", *(f"| {what} | {most} |" for what, most in rows)]) + "\n"


def _used() -> str:
    """Type, bounds and meaning of the fields that any API uses; with their numbers in GenerateRequest."""
    rows = sorted((field for field in FIELDS if field.meaning), key=lambda field: field.name)
    lines = (
        f"| `{row.name}` | {row.kind.value} | {_default(row)} | {_limits(row)} | {row.source} "
        f"| {'' if row.wire is None else row.wire.request} | {row.meaning} |"
        for row in rows
    )
    head = "| field | type | default | bounds | defined by | gRPC | meaning |\n" + "|---" * 7 + "|\n"
    return head + "\n".join(lines) + "\n"


def _default(row: RequestField) -> str:
    return "" if row.default is None else json.dumps(row.default)


def _limits(row: RequestField) -> str:
    parts = [] if row.bounds is None else [_range(row.bounds)]
    if row.most_items is not None:
        parts.append(f"{row.most_items} items")
    if row.most_chars is not None:
        parts.append(f"{row.most_chars:,} characters")
    return "; ".join(parts)


def _range(bounds: Bounds) -> str:
    if math.isinf(bounds.least):
        text = "any"
    elif math.isinf(bounds.most):
        text = f"above {_number(bounds.least)}" if bounds.above else f"{_number(bounds.least)} or more"
    else:
        text = f"{_number(bounds.least)} to {_number(bounds.most)}"
    if bounds.used is None:
        return text
    return f"{text}, used as {_number(bounds.used[0])} to {_number(bounds.used[1])}"


def _number(value: float) -> str:
    """Numbers at powers of two that are far from 1 as such."""
    power = round(math.log2(abs(value))) if value else 0
    if power < -20:
        return f"2^{power}"
    if power <= 20:
        return f"{value:,.6f}".rstrip("0").rstrip(".")
    rest = int(abs(value)) - 2**power
    return f"{'-' if value < 0 else ''}2^{power}{f' - {-rest}' if rest else ''}"


def _table() -> str:
    paths = list(TABLES)
    names = sorted({name for table in TABLES.values() for name in table})
    lines = [
        "| field | " + " | ".join(f"`{path}`" for path in paths) + " |",
        "|---" * (len(paths) + 1) + "|",
        *(
            "| `" + name + "` | " + " | ".join(_cell(TABLES[path], name) for path in paths) + " |"
            for name in names
        ),
    ]
    return "\n".join(lines) + "\n"


def _cell(table: FieldTable, name: str) -> str:
    field = table.get(name)
    if field is None:
        return "–"
    return _WORDS[field.treatment] + _exception(field)


def _exception(field: Field) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f" unless {values}" if values else ""


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
