"""The interface of a model's forward pass over chunks of prompts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.plan.prefill_step import PrefillStep
from baton.perf_model.prefill_fit import TimedPass
from baton.perf_model.row_times import RowTimes


class PromptPass(Protocol):
    """A model's forward pass over chunks of prompts; chunks that end at multiples of `alignment` cost least.

    `refused`: shapes of attention that the vendor's library does not support; `uncaptured`: why CUDA graphs
    could not be captured, or only those without rows that join, or empty; results are the same without, only
    slower. `graph_rows`: a pass of up to this number of rows, with those that join, is one graph; the host
    launches larger ones kernel by kernel, which may take it longer than the device. `timed_passes`: a pass of
    few rows and one of the most, timed at start-up; None where nothing was measured.
    """

    alignment: int
    refused: int
    uncaptured: str
    graph_rows: int

    @property
    def timed_passes(self) -> tuple[TimedPass, TimedPass] | None: ...

    @property
    def row_times(self) -> RowTimes:
        """Seconds of a layer's products by rows, measured at start-up."""

    def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        """Writes keys and values into the chunks' blocks → [N, hidden] after the final norm, rows packed in
        the chunks' order; valid until the next pass. Runs the rows that join, too."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] → [M, vocab] in the model's dtype."""
