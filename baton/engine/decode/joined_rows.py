"""A decode step's rows in a pass that a prefill step runs: the step without its layers, which are the pass's.

    begin ─ plan ─ embed ─ ( attention ) a layer ─ head ─ simple sampler ─ finish

The step is the one that a graph of the same bucket runs (`graph_step`, on other devices `follower_step`), and
counts as a replay.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.decode.follower_step import FollowerStep
from baton.engine.decode.graph_step import GraphStep
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.forward.workspace import Workspace
from baton.engine.model.layers.attention import Attention
from baton.engine.plan.decode_state import SIMPLE


class JoinedDecodeRows:
    """The rows of a bucket, by the launches of a `GraphStep`."""

    def __init__(self, step: GraphStep, bucket: int, followers: Sequence[FollowerStep] = ()) -> None:
        self.rows = bucket
        self.followers: Sequence[JoinedRows] = [JoinedFollowerRows(one, bucket) for one in followers]
        self._step = step

    def begin(self, workspace: Workspace) -> None:
        self._step.begin(self.rows, SIMPLE)
        self._step.send_rows()
        self._step.plan(self.rows)
        self._step.pass_.embed(self.rows, workspace)

    def attend(self, attention: Attention, workspace: Workspace) -> None:
        self._step.pass_.attend(attention, self.rows, workspace)

    def end(self, workspace: Workspace) -> None:
        logits = self._step.pass_.head(self.rows, workspace)
        self._step.keep_if_whole()
        self._step.draw(self.rows, logits)


class JoinedFollowerRows:
    """The same rows on a device other than the first, by the launches of a `FollowerStep`."""

    followers: Sequence[JoinedRows] = ()

    def __init__(self, step: FollowerStep, bucket: int) -> None:
        self.rows = bucket
        self._step = step

    def begin(self, workspace: Workspace) -> None:
        self._step.begin(self.rows)
        self._step.pass_.embed(self.rows, workspace)

    def attend(self, attention: Attention, workspace: Workspace) -> None:
        self._step.pass_.attend(attention, self.rows, workspace)

    def end(self, workspace: Workspace) -> None:
        self._step.pass_.head(self.rows, workspace)
