"""Whether a place in a JSON text is within a string, an object or a list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Nesting:
    """`take` a value's characters in order. `depth`: of objects and lists; below 0 where more were closed
    than opened. `quoted`: within a string."""

    depth: int = 0
    quoted: bool = False
    _escaped: bool = False

    @property
    def open(self) -> bool:
        """Whether the value goes on; that of a number is not known."""
        return self.quoted or self.depth > 0

    def take(self, character: str) -> None:
        """The next character."""
        if self.quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self.quoted = False
        elif character == '"':
            self.quoted = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
