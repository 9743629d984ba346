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
    """`forced`: those of which at least one must be called; empty: the model may choose. `most_calls`: so
    many calls at most, where some are forced."""

    tools: tuple[Tool, ...]
    forced: tuple[Tool, ...] = ()
    most_calls: int = MOST_CALLS
