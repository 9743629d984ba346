"""Writes the chart's README.md: README.intro.md and a table of all values.

python -m deploy.helm.build_readme            writes it
python -m deploy.helm.build_readme --check    exit code 1 where it is not what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.helm.values_comments import CHART, Value, read_values

INTRO = Path(__file__).parent / "README.intro.md"
TARGET = CHART / "README.md"


def build() -> str:
    """The text of README.md. Raises ValueError for a value without a comment."""
    values = read_values()
    sections = dict.fromkeys(value.path[0] for value in values)
    tables = [_table(name, [value for value in values if value.path[0] == name]) for name in sections]
    lone = [row for rows in tables if len(rows) == 1 for row in rows]
    lines = [INTRO.read_text(encoding="utf-8").rstrip(), "", "## Values", "", *_head(), *lone]
    for name, rows in zip(sections, tables, strict=True):
        if len(rows) > 1:
            lines += ["", f"### {name}", "", *_head(), *rows]
    return "\n".join(lines) + "\n"


def _head() -> list[str]:
    return ["| key | default | what it is |", "|---|---|---|"]


def _table(name: str, values: list[Value]) -> list[str]:
    return [f"| `{key}` | {default} | {comment} |" for key, default, comment in _rows(values)]


def _rows(values: list[Value]) -> Iterator[tuple[str, str, str]]:
    """One for each value; a map with a comment that none of its keys has is one value."""
    parents = {value.path[:-1] for value in values if value.comment}
    whole: set[tuple[str, ...]] = set()
    for value in values:
        if value.path[:-1] in whole:
            whole.add(value.path)
            continue
        section = isinstance(value.default, dict) and value.path in parents
        if not value.comment and not section and not _has_parts(value, values):
            raise ValueError(f"values.yaml does not say what {'.'.join(value.path)} is")
        if section or (not value.comment and _has_parts(value, values)):
            if value.comment:
                yield ".".join(value.path), "", value.comment
            continue
        if isinstance(value.default, dict):
            whole.add(value.path)
        yield ".".join(value.path), _shown(value.default), value.comment


def _has_parts(value: Value, values: list[Value]) -> bool:
    depth = len(value.path)
    return any(
        len(other.path) > depth and other.path[:depth] == value.path and other.comment for other in values
    )


def _shown(default: Any) -> str:  # noqa: ANN401
    if default == "":
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def main(arguments: list[str]) -> int:
    """Writes or checks the file; the exit code."""
    text = build()
    if "--check" not in arguments:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET} is out of date: python -m deploy.helm.build_readme", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
