"""A worker's devices on a CPU, whose steps run in turn: each in a thread of its own, one at a time, from node
to node. A rank that reads what no rank has sent reads nan."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from baton.engine.kernels.fusion import Norm
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.model.modules import Model
from baton.engine.parallel.exchange import ExchangeTimeout, ExchangeTimeoutError
from baton.engine.parallel.rank_exchange import Launch, RankExchange
from baton.engine.parallel.ranks_in_turn import sum_in_order

# Far longer than a step takes.
_PATIENCE_S = 120.0


class TurnGroup:
    """A `DeviceGroup` of so many ranks. `whole` may be set to 0, as a failed exchange does; then the next
    `check` raises."""

    deadline_s = 2.0

    def __init__(self, models: Sequence[Model], rows: int) -> None:
        config, dtype = models[0].config, models[0].precision.activations
        self.logits = torch.full((rows, config.vocab_size), torch.nan, dtype=dtype)
        self.whole = torch.ones(1, dtype=torch.int32)
        self.turns = [TurnRank(self, rank, config.hidden_size, dtype) for rank in range(len(models))]
        self.ranks: Sequence[RankExchange] = self.turns
        self.sums = 2 * config.num_layers
        self.steps = 0
        self._turn = 0
        self._running: list[bool] = []
        self._changed = threading.Condition()

    def solo(self) -> AbstractContextManager[None]:
        return nullcontext()

    def launch(self, steps: Sequence[Launch]) -> None:
        """Runs the step of each rank to its next node, in rank order, until all have ended."""
        assert len(steps) == len(self.ranks)
        self._running, self._turn, errors = [True] * len(steps), 0, list[BaseException]()

        def run(rank: int, step: Launch) -> None:
            try:
                with torch.inference_mode():
                    self._await(rank)
                    step()
            except BaseException as error:
                errors.append(error)
            finally:
                self._running[rank] = False
                self.give_turn(rank, await_own=False)

        threads = [
            threading.Thread(target=run, args=(rank, step), daemon=True) for rank, step in enumerate(steps)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert len({one.nodes for one in self.turns}) == 1, "ranks with other nodes than the others"
        self.steps += 1

    def give_turn(self, rank: int, *, await_own: bool = True) -> None:
        """Lets the ranks behind this one go on to the node that it has reached."""
        with self._changed:
            running = [n for n, runs in enumerate(self._running) if runs]
            self._turn = min((n for n in running if n > rank), default=min(running, default=0))
            self._changed.notify_all()
        if await_own:
            self._await(rank)

    def _await(self, rank: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == rank, _PATIENCE_S)

    def check(self) -> None:
        if not int(self.whole):
            raise ExchangeTimeoutError(ExchangeTimeout(0, 1, self.steps, 1, 0, self.deadline_s))


class TurnRank:
    """A `RankExchange` of one rank."""

    def __init__(self, group: TurnGroup, rank: int, width: int, dtype: torch.dtype) -> None:
        self.logits, self.whole = group.logits, group.whole
        self.nodes: tuple[int, ...] = ()
        self.rows: Tensor | None = None
        self._group, self._rank = group, rank
        self.parts = torch.full((len(group.logits), width), torch.nan, dtype=dtype)
        self._sums = 0
        self.norms = 0
        """Sums of the last step that computed the next norm."""

    def begin(self, rows: Tensor) -> None:
        self._sums, self.norms, self.nodes, self.rows = 0, 0, (0,), rows
        self._meet()
        sent = self._group.turns[0].rows
        assert sent is not None
        rows.copy_(sent)

    def part(self, rows: int) -> Tensor:
        return self.parts[:rows].fill_(torch.nan)

    def reduce(self, hidden: Tensor, post_norm: Norm | None, norm: tuple[Norm, Tensor] | None) -> None:
        self._sums += 1
        self.nodes += (self._sums,)
        self._meet()
        total = sum_in_order([one.parts[: len(hidden)] for one in self._group.turns])
        if post_norm is not None:
            total = rms_norm(total, post_norm.gain, post_norm.eps)
        hidden.add_(total)
        if norm is not None:
            self.norms += 1
            norm[1].copy_(rms_norm(hidden, norm[0].gain, norm[0].eps))
        self._meet()  # before anyone writes the part of the next sum

    def end(self, part: Tensor, column: int) -> None:
        assert self._sums == self._group.sums
        self.nodes += (self._sums + 1,)
        self.logits[: len(part), column : column + part.shape[1]] = part
        self._meet()

    def _meet(self) -> None:
        self._group.give_turn(self._rank)
