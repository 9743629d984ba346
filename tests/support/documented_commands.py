"""The commands that the console blocks of README, docs and the chart's pages show."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGES = [
    _ROOT / "README.md",
    *sorted((_ROOT / "docs").glob("*.md")),
    *sorted((_ROOT / "deploy").rglob("*.md")),
]
_ENDS = ("&", "|", ">", "&&")


def documented(program: str) -> list[tuple[str, ...]]:
    """The arguments of each call of a program, without what a shell does before it and behind it."""
    return sorted(set(_calls(program)))


def _calls(program: str) -> Iterator[tuple[str, ...]]:
    for page in _PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                if found := re.match(rf"\$ (?:.* -- |sudo |[A-Z_]+=\S+ )*{program} (.*)", line):
                    words = shlex.split(found[1], comments=True)
                    yield tuple(itertools.takewhile(lambda word: word not in _ENDS, words))
