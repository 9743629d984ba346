"""A prefill step's forward pass on the devices of a worker, each with its part of the model.

    prepare on each ─▶ ( begin ─ layers, exchanging sums ─ end ) on all ─▶ ( begin ─ head ─ end ) on all

The host knows the rows of a step and gives them to every device. All that needs memory, or could wait for a
device, is done before the first launch of a step: a device that has begun waits for all others. Launches are
made rank by rank up to the next sum; where steps are graphs, one replay each. Logits are of few rows, and not
of every step, so that gathering them is a step of the exchange by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from baton.device.streams.cuda_stream import compute_stream, on_device
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.parallel.rank_exchange import DeviceGroup, Launches
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.prefill.gpu_pass import PrefillPass, time_pass
from baton.engine.prefill.graphs import GraphBounds
from baton.perf_model.prefill_fit import TimedPass
from baton.perf_model.row_times import RowTimes


class GroupPass:
    """A `PromptPass` of several devices, by a `PrefillPass` on each."""

    def __init__(self, passes: Sequence[PrefillPass], group: DeviceGroup) -> None:
        """`passes`: by rank, of the same numbers of rows, each with its rank's exchange of `group`; without
        the attention library, which allocates what it computes."""
        self.passes = passes
        self._group = group
        self._first = passes[0]
        self.alignment = self._first.alignment
        self.refused = sum(one.refused for one in passes)
        self.uncaptured = ""
        self.graph_rows = 0
        self.timed_passes: tuple[TimedPass, TimedPass] | None = None
        self.row_times = RowTimes()

    def warm(self) -> None:
        """Launches all kernels that passes will need, on one device after the other. The devices must be
        `solo`, as for `capture`."""
        for one in self.passes:
            with on_device(one.device):
                one.warm()
                one.gather_logits(1)

    def measure_products(self) -> None:
        """Times the products of the first device, by which the passes of all have their numbers of rows."""
        with on_device(self._first.device):
            self._first.measure_products()
        self.row_times = self._first.row_times
        for one in self.passes:
            one.row_times = self.row_times

    def capture(self, bounds: GraphBounds | None = None) -> None:
        """Captures CUDA graphs on each device; see `PrefillPass.capture`."""
        for one in self.passes:
            with on_device(one.device):
                one.capture(bounds)
        self.uncaptured = next(filter(None, (one.uncaptured for one in self.passes)), "")
        self.graph_rows = min(one.graph_rows for one in self.passes)

    def measure_step_times(self) -> None:
        """Times a small pass and the largest, on all devices. Raises ExchangeTimeoutError where one of them
        has waited for another in vain."""
        stream = compute_stream(*(one.device for one in self.passes))
        few, most = self._first.steps_to_time()
        self.timed_passes = time_pass(self.forward, few, stream), time_pass(self.forward, most, stream)
        self._group.check()

    def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        """Writes each device's keys and values into the chunks' blocks → [N, hidden] after the final norm on
        the first one, as `PrefillPass.forward`. `joined`: also on the other devices, as its `followers`."""
        joins: Sequence[JoinedRows | None] = [None] * len(self.passes)
        if joined is not None:
            joins = [joined, *joined.followers]
        launches = []
        for one, mine in zip(self.passes, joins, strict=True):
            with on_device(one.device):
                launches.append(_on(one.device, one.prepare(step, mine)))
        self._group.launch_in_turns(launches)
        return self._first.result(step.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden] of `forward` → [M, vocab] in the model's dtype, on the first device."""
        gathered = self._group.ranks[0].logits
        logits = gathered.new_empty(len(hidden), gathered.shape[1])
        for first in range(0, len(hidden), len(gathered)):
            rows = hidden[first : first + len(gathered)]
            for one in self.passes:
                one.ask(rows)
            self._group.launch([partial(_gather, one, len(rows)) for one in self.passes])
            logits[first : first + len(rows)].copy_(gathered[: len(rows)])
        return logits


def _gather(one: PrefillPass, rows: int) -> None:
    with on_device(one.device):
        one.gather_logits(rows)


def _on(device: torch.device, launches: Launches) -> Launches:
    """The same launches, each piece with `device` as the current one."""
    while True:
        with on_device(device):
            try:
                next(launches)
            except StopIteration:
                return
        yield
