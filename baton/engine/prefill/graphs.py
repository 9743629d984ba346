"""Prefill steps of few rows as graphs, one for each number of rows that products have; and where rows of a
decode step join them, for each number of those.

A step of a few hundred rows takes the host longer to launch, kernel by kernel, than a GPU to run. A graph is
one launch; what differs from step to step is in memory, where one copy puts it before the replay. A step
that has more than its graph has room for, or uses the attention library, is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.device.streams.graphs import Graph, Recorder
from baton.device.streams.upload import put_ints
from baton.engine.forward.joined_rows import JoinedRows, row_count
from baton.engine.prefill.step_inputs import InputLayout, Places, StepInputs

Case = tuple[InputLayout, JoinedRows | None]
"""The case of one graph: the layout of its inputs, and the rows that join it."""


@dataclass(frozen=True, slots=True)
class GraphBounds:
    """Bounds of the steps that are graphs: up to `rows` rows, with the rows of a decode step that join them,
    of `least_chunks` chunks and one more for every `rows_a_chunk` rows, with up to `entries` of block tables
    in all their cache groups together.

    A graph's attention has programs for the items that such a step may have; those that a step does not have
    end at once, but thousands of them would be felt.
    """

    rows: int = 1024
    least_chunks: int = 8
    rows_a_chunk: int = 16
    entries: int = 16384

    def chunks(self, rows: int) -> int:
        """Maximum number of chunks in a step of `rows` rows."""
        return self.least_chunks + rows // self.rows_a_chunk


class PrefillGraphs:
    """Owns the inputs that graphs read, and the graphs. All run on one stream, so that the inputs of a
    step are copied after the one before has read its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inputs = torch.zeros(0, dtype=torch.int32, device=device)
        # By rows of prompts and rows that join them.
        self._graphs: dict[tuple[int, int], tuple[InputLayout, Graph]] = {}

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows of prompts and rows that join them, of each graph; empty where there is none."""
        return list(self._graphs)

    def capture(self, cases: Iterable[Case], launch: Callable[[Case, Places[Tensor]], None]) -> str:
        """Captures one graph for each case, of what `launch` does with inputs that stand there. It runs
        once on zeros: all rows are token 0, at position 0 of the scratch block. If the device has no memory
        for all of them there are none, or only those without rows that join, if these fit; returns why, or an
        empty string."""
        cases = list(cases)
        recorder = Recorder(self._device)
        size = max((layout.size for layout, _ in cases), default=0)
        self._inputs = torch.zeros(size, dtype=torch.int32, device=self._device)
        try:
            for case in cases:
                layout, joined = case
                graph = recorder.capture(partial(launch, case, layout.places(self._inputs)))
                graph()  # the first also brings it to the GPU
                self._graphs[layout.rows, row_count(joined)] = layout, graph
        except RuntimeError as error:
            alone = {key: found for key, found in self._graphs.items() if key[1] == 0}
            self._graphs = alone if joined is not None else {}
            return str(error) or type(error).__name__
        return ""

    def prepare(self, step: StepInputs, joined: JoinedRows | None = None) -> Graph | None:
        """Enqueues the copy of the step's inputs on the current stream → the graph that is to follow it
        there; None where no graph is for the step, and nothing was done."""
        found = self._graphs.get((step.rows, row_count(joined)))
        if found is None or any(plan.attention.by_library for plan in step.plans):
            return None
        layout, graph = found
        if not step.fits(layout):
            return None
        put_ints(step.values(layout), self._inputs)
        return graph
