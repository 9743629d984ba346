"""Reads files and commands of a page of the documentation: fenced blocks behind a line that says where they
belong, such as "`/etc/baton/router.yaml` on `router`:" or "On `d1` and `d2`:"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.manifests.container import REPOSITORY

_BLOCK = re.compile(
    r"^(?:`(?P<path>/[^`]+)` on|On) (?P<hosts>`[^:]*`):\n\n```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
_FENCE = re.compile(r"^```\w+$", re.M)


@dataclass(frozen=True)
class Block:
    """A file (`path`) or commands, for each of `hosts`."""

    hosts: tuple[str, ...]
    path: str | None
    text: str

    @property
    def commands(self) -> list[str]:
        """Each command with its further lines."""
        assert self.path is None
        found: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append(line.removeprefix("$ "))
            else:
                assert line.startswith("  "), f"neither a command nor a further line of one: {line!r}"
                found[-1] += f"\n{line}"
        return found


def read_blocks(name: str) -> list[Block]:
    """The blocks of docs/NAME, in order. AssertionError where one does not say where it belongs."""
    text = (REPOSITORY / "docs" / name).read_text()
    found = [
        Block(tuple(re.findall(r"`(\w+)`", match["hosts"])), match["path"], match["text"])
        for match in _BLOCK.finditer(text)
    ]
    for block in found:
        assert (block.path is None) == block.text.startswith("$ "), block
    return found


def count_of_fences(name: str) -> int:
    """The number of blocks on the page, those among them included that say nothing of hosts."""
    return len(_FENCE.findall((REPOSITORY / "docs" / name).read_text()))
