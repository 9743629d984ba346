"""Rows of another step that share a forward pass. Importing this module does not import Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from baton.engine.model.layers.attention import Attention

if TYPE_CHECKING:
    from baton.engine.forward.workspace import Workspace


class JoinedRows(Protocol):
    """Rows of another step that share a pass: its products are of the rows of both, all else is launched by
    each for its own. `rows`: how many they are. The pass calls `begin`, for each layer `attend`, then `end`;
    `workspace` has these rows first."""

    rows: int

    @property
    def followers(self) -> Sequence[JoinedRows]:
        """The same rows on the worker's other devices, by rank."""

    def begin(self, workspace: Workspace) -> None:
        """Launches what comes before the layers, and the embedding."""

    def attend(self, attention: Attention, workspace: Workspace) -> None:
        """Launches a layer's attention, from `qkv` into `attn_out`."""

    def end(self, workspace: Workspace) -> None:
        """Launches what comes after the layers, from `hidden`."""


def row_count(joined: JoinedRows | None) -> int:
    """Number of rows that join; 0 if there are none."""
    return 0 if joined is None else joined.rows
