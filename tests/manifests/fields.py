"""Reads a mapping such that no key is overlooked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

_REQUIRED = object()


class UnknownFieldError(AssertionError):
    """A manifest has a key that its reader has not read."""


class Fields:
    """One mapping of a manifest. At the end of its `with` block every key must have been read."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        """`where`: the place in the manifest, for messages."""
        self._left = dict(data)
        self._where = where

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of a key, which may be missing only where there is a default."""
        if key not in self._left and default is not _REQUIRED:
            return default
        assert key in self._left, f"{self._where}.{key} is missing"
        return self._left.pop(key)

    def section(self, key: str) -> Fields:
        """The mapping at a key; an empty one where there is none."""
        return Fields(self.take(key, None) or {}, f"{self._where}.{key}")

    def sections(self, key: str) -> list[Fields]:
        """The mappings in the list at a key."""
        values = self.take(key, None) or []
        return [Fields(value, f"{self._where}.{key}[{place}]") for place, value in enumerate(values)]

    def expect(self, key: str, *values: Any) -> None:
        """Reads a key that has no effect here beyond one of these values, or is missing."""
        value = self.take(key, None)
        assert value is None or value in values, f"{self._where}.{key} is {value!r}, not one of {values}"

    def ignore(self, *keys: str) -> None:
        """Reads keys without a meaning to processes of one machine."""
        for key in keys:
            self.take(key, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._left:
            raise UnknownFieldError(f"{self._where}: unknown keys {', '.join(sorted(self._left))}")
