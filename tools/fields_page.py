"""Writes the tables of docs/fields.md from the code: `python tools/fields_page.py`."""

from __future__ import annotations

import json
from pathlib import Path

from services.grammar.compile_process import CPU_S, MEMORY_BYTES
from services.grammar.launch import STACK_BYTES
from services.router.formats.field_table import TABLES, Field, FieldTable, Treatment
from services.router.request.bounds import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_RULES, MAX_TOOLS

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"
_WORDS = {Treatment.USED: "used", Treatment.NO_EFFECT: "no effect", Treatment.REFUSED: "refused"}


def with_tables(page: str) -> str:
    """The page with the text between the marks of each table replaced by the table."""
    for name, table in (("fields", _table()), ("bounds of grammars", _bounds())):
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
