"""Writes the table of docs/fields.md from the fields in the code: `python tools/fields_page.py`."""

from __future__ import annotations

import json
from pathlib import Path

from services.router.formats.field_table import TABLES, Field, FieldTable, Treatment

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"
_WORDS = {Treatment.USED: "used", Treatment.NO_EFFECT: "no effect", Treatment.REFUSED: "refused"}
_BEGIN, _END = "<!-- fields -->\n", "<!-- end of fields -->"


def with_table(page: str) -> str:
    """The page with the text between its two marks replaced by the table."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    return before + begin + _table() + end + after


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
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
