"""A worker's devices on a CPU that exchange by the kernels themselves, compiled for the host: a step's other
kernels run in Triton's interpreter, rank by rank, and each node on all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from baton.engine.decode.gpu_group import exchange_shape
from baton.engine.kernels.fusion import Norm
from baton.engine.model.modules import Model
from baton.engine.parallel.exchange import Exchange
from baton.engine.parallel.rank_exchange import ExchangeGroup, RankExchange
from tests.engine.parallel.host.devices import Hold, HostWorker
from tests.engine.parallel.host.steps import DEADLINE_NS
from tests.engine.parallel.turns import TurnGroup


class HostGroup(TurnGroup):
    """A `DeviceGroup` of `HostWorker`'s devices. `late`: a node of the next step, and the rank that comes to
    it later than the deadline."""

    late: tuple[int, int] | None = None

    def __init__(self, models: Sequence[Model], rows: int) -> None:
        super().__init__(models, rows)
        self.worker = HostWorker(len(models))
        shape, dtype = exchange_shape(models[0], len(models), rows), models[0].precision.activations
        self.exchange = Exchange(self.worker.devices, shape, dtype)
        nodes = ExchangeGroup(self.exchange, self.logits, self.deadline_s).ranks
        self.ranks = [HostRank(self, rank, each) for rank, each in enumerate(nodes)]
        self.whole = self.exchange.whole

    def run_node(self, number: int) -> None:
        """Runs what all ranks have launched of a node, by its number in the step."""
        holds = []
        if self.late is not None and number == self.late[0]:
            holds.append(Hold(self.late[1], 0, 0, 2 * DEADLINE_NS))
            self.late = None
        assert self.worker.run(holds) == 0

    def solo(self) -> AbstractContextManager[None]:
        return self.exchange.solo()

    def check(self) -> None:
        self.exchange.check()


class HostRank:
    """A `RankExchange` whose nodes are run when all ranks have launched theirs."""

    def __init__(self, group: HostGroup, rank: int, nodes: RankExchange) -> None:
        self.logits, self.whole = nodes.logits, nodes.whole
        self._group, self._rank, self._nodes = group, rank, nodes
        self._node = 0

    def begin(self, rows: Tensor) -> None:
        self._node = 0
        self._nodes.begin(rows)
        self._meet()

    def part(self, rows: int) -> Tensor:
        return self._nodes.part(rows)

    def reduce(self, hidden: Tensor, post_norm: Norm | None, norm: tuple[Norm, Tensor] | None) -> None:
        self._nodes.reduce(hidden, post_norm, norm)
        self._meet()

    def end(self, part: Tensor, column: int) -> None:
        self._nodes.end(part, column)
        self._meet()

    def _meet(self) -> None:
        self._group.give_turn(self._rank)
        if self._rank == 0:  # which goes on first
            self._group.run_node(self._node)
        self._node += 1
