"""A decode step on a worker's devices other than the first.

    await rows ─ plan ─ layers, exchanging sums ─ head ─ logits to the first device

The first device applies the mailbox, sends the rows, samples and publishes (`graph_step`); a follower has its
part of the model, keys and values of its heads, and a copy of the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from baton.device.streams.graphs import Graph, GraphStream
from baton.engine.decode.attention_plan import plan_attention
from baton.engine.decode.gpu_pass import DecodePass, PassOptions
from baton.engine.decode.step_rows import StepRows
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.modules import Model
from baton.engine.parallel.rank_exchange import RankExchange
from baton.engine.shared_memory.step_shape import StepShape


class FollowerStep:
    """Owns the state of a follower's steps, one row a slot, and captures their graphs."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        block_tables: tuple[Tensor, ...],
        shape: StepShape,
        options: PassOptions,
        exchange: RankExchange,
    ) -> None:
        """`block_tables`: on this device. Raises ValueError where slots have several rows, which need drafts
        that a follower is not sent."""
        if shape.rows_per_slot > 1:
            raise ValueError(f"{shape.rows_per_slot} rows a slot on several devices")
        self._shape = shape
        self._exchange = exchange
        self._rows = StepRows.empty(shape.rows, model.device)
        self.pass_ = DecodePass(
            model, cache, block_tables, shape.rows, options, step_rows=self._rows, exchange=exchange
        )
        self.queue = GraphStream(model.device)

    def capture(self, batches: Sequence[int]) -> dict[int, Graph]:
        """Captures the graphs of steps by rows. Capturing runs steps, so the devices must be `solo`."""
        graphs = {bucket: self.queue.capture(partial(self._run, bucket)) for bucket in batches}
        self.queue.drain()
        return graphs

    def begin(self, bucket: int) -> None:
        """Launches what comes before the layers and the embedding: the wait for a step's rows, of which there
        are up to `bucket`, and the plan of their attention."""
        self._exchange.begin(self._rows.sent)
        plan_attention(self.pass_, self._rows.control, self._shape, bucket)

    def _run(self, bucket: int) -> None:
        self.begin(bucket)
        self.pass_.run(bucket)
