"""A decode step's rows in a pass that a prefill step runs: the step without its layers, which are the pass's.

    begin ─ plan ─ embed ─ ( attention ) a layer ─ head ─ simple sampler ─ finish

The step is the one that a graph of the same bucket runs (`graph_step`), and counts as a replay.
"""

from __future__ import annotations

from baton.engine.decode.graph_step import GraphStep
from baton.engine.forward.workspace import Workspace
from baton.engine.model.layers.attention import Attention
from baton.engine.plan.decode_state import SIMPLE


class JoinedDecodeRows:
    """The rows of a bucket, by the launches of a `GraphStep`."""

    def __init__(self, step: GraphStep, bucket: int) -> None:
        self.rows = bucket
        self._step = step

    def begin(self, workspace: Workspace) -> None:
        self._step.begin(self.rows, SIMPLE)
        self._step.plan(self.rows)
        self._step.pass_.embed(self.rows, workspace)

    def attend(self, attention: Attention, workspace: Workspace) -> None:
        self._step.pass_.attend(attention, self.rows, workspace)

    def end(self, workspace: Workspace) -> None:
        self._step.draw(self.rows, self._step.pass_.head(self.rows, workspace))
