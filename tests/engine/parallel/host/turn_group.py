"""A worker's devices on a CPU that exchange by the kernels themselves, compiled for the host: a step's other
kernels run in Triton's interpreter, rank by rank, and each node on all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from baton.engine.decode.gpu_group import exchange_shape
from baton.engine.kernels.fusion import Norm
from baton.engine.model.modules import Model
from baton.engine.parallel.exchange import Exchange
from baton.engine.parallel.rank_exchange import ExchangeGroup, RankExchange
from tests.engine.parallel.host.devices import NEVER, Hold, HostWorker
from tests.engine.parallel.host.steps import DEADLINE_NS
from tests.engine.parallel.turns import TurnGroup


class HostGroup(TurnGroup):
    """A `DeviceGroup` of `HostWorker`'s devices. `late`: a node of the next step, or of the one `behind`
    steps later, and the rank that comes to it later than the deadline, or with `never` not at all, nor to any
    later one."""

    late: tuple[int, int] | None = None
    behind = 0
    never = False

    def __init__(self, models: Sequence[Model], rows: int, prompt_rows: int = 0) -> None:
        super().__init__(models, rows, prompt_rows)
        self.worker = HostWorker(len(models))
        shape = exchange_shape(models[0], len(models), rows, prompt_rows)
        dtype = models[0].precision.activations
        self.exchange = Exchange(self.worker.devices, shape, dtype)
        nodes = ExchangeGroup(self.exchange, self.logits, self.deadline_s).ranks
        self.ranks = [HostRank(self, rank, each) for rank, each in enumerate(nodes)]
        self.whole = self.exchange.whole
        self._gone: int | None = None

    def run_node(self, number: int) -> None:
        """Runs what all ranks have launched of a node, by its number in the step."""
        holds = [] if self._gone is None else [Hold(self._gone, 0, 0, NEVER)]
        if self.late is not None and number == self.late[0] and not self.behind:
            rank, self.late = self.late[1], None
            holds.append(Hold(rank, 0, 0, NEVER if self.never else 2 * DEADLINE_NS))
            self._gone = rank if self.never else None
        if number == self.exchange.shape.last_node and self.behind:
            self.behind -= 1
        assert self.worker.run(holds) == (self._gone is not None)

    @contextmanager
    def _run_alone(self) -> Iterator[None]:
        self.alone = True
        with self.exchange.solo():
            yield
        self.alone = False

    def check(self) -> None:
        self.exchange.check()


class HostRank:
    """A `RankExchange` whose nodes are run when all ranks have launched theirs."""

    def __init__(self, group: HostGroup, rank: int, nodes: RankExchange) -> None:
        self.logits, self.whole = nodes.logits, nodes.whole
        self._group, self._rank, self._nodes = group, rank, nodes
        self._sums = 0

    def begin(self, rows: Tensor | None) -> None:
        self._sums = 0
        self._nodes.begin(rows)
        self._meet(0)

    def part(self, rows: int) -> Tensor:
        return self._nodes.part(rows)

    def reduce(
        self,
        hidden: Tensor,
        post_norm: Norm | None,
        norm: tuple[Norm, Tensor] | None,
        scales: Tensor | None = None,
    ) -> None:
        self._nodes.reduce(hidden, post_norm, norm, scales)
        self._sums += 1
        self._meet(self._sums)

    def end(self, part: Tensor, column: int) -> None:
        self._nodes.end(part, column)
        self._meet(self._group.exchange.shape.last_node)

    def _meet(self, node: int) -> None:
        if self._group.alone:
            assert self._group.worker.run() == 0
            return
        self._group.give_turn(self._rank)
        if self._rank == 0:  # which goes on first
            self._group.run_node(node)
