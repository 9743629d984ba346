"""Reads what values.yaml says of each of its keys.

name: ""  # Comment.            a comment behind a key is that key's

# Comment of several
# lines.                        so is one directly above it, with the same indentation
name: ""
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "baton"
# Built on libyaml, if PyYAML is: six times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][\w.]*):(?P<value>.*)$")
_COMMENT = re.compile(r"^(?P<indent> *)# ?(?P<text>.*)$")


@dataclass(frozen=True)
class Value:
    """One key: its path, its comment ("" without one) and its default."""

    path: tuple[str, ...]
    comment: str
    default: Any


def read_values(file: Path = CHART / "values.yaml") -> list[Value]:
    """All keys in the order of the file."""
    text = file.read_text(encoding="utf-8")
    defaults = yaml.load(text, LOADER)  # noqa: S506 (a safe loader)
    return [Value(path, comment, _at(defaults, path)) for path, comment in _comments(text)]


def _comments(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    path: list[tuple[int, str]] = []
    above: list[str] = []
    for line in text.splitlines():
        if comment := _COMMENT.match(line):
            above.append(comment["text"])
        elif key := _KEY.match(line):
            indent = len(key["indent"])
            path = [(depth, name) for depth, name in path if depth < indent] + [(indent, key["key"])]
            behind = re.search(r" # (.*)$", key["value"])
            yield tuple(name for _, name in path), " ".join([*above, behind[1]] if behind else above)
            above = []
        else:
            above = []


def _at(values: dict[str, Any], path: tuple[str, ...]) -> Any:  # noqa: ANN401
    found: Any = values
    for key in path:
        found = found[key]
    return found
