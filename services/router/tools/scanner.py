"""What reads one call while it is being written, however it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

# The tools that may be called: their names, and the JSON schemas of their arguments.
Tools = Mapping[str, Mapping[str, Any]]
LONGEST_NAME = 64


class MalformedCallError(ValueError):
    """The text is no call. `rest`: what came behind the part that still belonged to one."""

    def __init__(self, rest: str = "") -> None:
        super().__init__("the text is no call")
        self.rest = rest


class Scanner(Protocol):
    """Reads one call."""

    @property
    def raw(self) -> str:
        """All text that was taken before the name was known."""

    @property
    def name(self) -> str | None:
        """The tool's name, once it is known."""

    @property
    def ended(self) -> bool:
        """Whether the call has ended."""

    def push(self, text: str) -> str:
        """Takes text up to the call's end; the rest. Raises MalformedCallError."""

    def take_arguments(self) -> str:
        """The JSON text of the arguments that came since the last call; none before the name."""
