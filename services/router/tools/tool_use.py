"""The tools of a request, and whether the model has to call one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Calls that one output may be made to have: a bound, so that it ends.
MOST_CALLS = 16


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """Tools that the model may call. `forced`: those of which at least one must be called; empty: the model
    may choose. `only_one`: an output has one call at most."""

    tools: tuple[Tool, ...]
    forced: tuple[Tool, ...] = ()
    only_one: bool = False

    @property
    def most_calls(self) -> int:
        """The most calls of an output that is forced to have some."""
        return 1 if self.only_one else MOST_CALLS
