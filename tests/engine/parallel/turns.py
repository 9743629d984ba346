"""A worker's devices on a CPU, whose steps run in turn: each in a thread of its own, one at a time, from node
to node. A rank that reads what no rank has sent reads nan."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from baton.engine.decode.gpu_group import logit_rows
from baton.engine.kernels.fusion import Norm
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.model.modules import Model
from baton.engine.model.quantization.quantize import quantize
from baton.engine.parallel.exchange import ExchangeTimeout, ExchangeTimeoutError
from baton.engine.parallel.rank_exchange import Launch, Launches, RankExchange
from baton.engine.parallel.ranks_in_turn import sum_in_order

# Far longer than a step takes.
_PATIENCE_S = 120.0


class TurnGroup:
    """A `DeviceGroup` for steps of as many rows as `gpu_group` is given. `whole` may be set to 0, as a failed
    exchange does; then the next `check` raises."""

    deadline_s = 2.0

    def __init__(self, models: Sequence[Model], rows: int, prompt_rows: int = 0) -> None:
        config, dtype = models[0].config, models[0].precision.activations
        most = logit_rows(rows, prompt_rows)
        self.logits = torch.full((most, config.vocab_size), torch.nan, dtype=dtype)
        self.whole = torch.ones(1, dtype=torch.int32)
        parts = torch.full((max(rows, prompt_rows), config.hidden_size), torch.nan, dtype=dtype)
        self.turns = [TurnRank(self, rank, parts.clone()) for rank in range(len(models))]
        self.ranks: Sequence[RankExchange] = self.turns
        self.sums = 2 * config.num_layers
        self.steps = 0
        self.alone = False
        """True within `solo`."""
        self._turn = 0
        self._running: list[bool] = []
        self._changed = threading.Condition()

    @contextmanager
    def _run_alone(self) -> Iterator[None]:
        self.alone = True
        yield
        self.alone = False

    def solo(self) -> AbstractContextManager[None]:
        return self._run_alone()

    def launch_in_turns(self, steps: Sequence[Launches]) -> None:
        self.launch([partial(_make_all, step) for step in steps])

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
            raise ExchangeTimeoutError(
                ExchangeTimeout(0, 1, self.steps, 1, 0, self.deadline_s, self.steps, 0)
            )


def _make_all(launches: Launches) -> None:
    for _ in launches:
        pass


class TurnRank:
    """A `RankExchange` of one rank, which writes its parts [rows, width] into `parts`."""

    def __init__(self, group: TurnGroup, rank: int, parts: Tensor) -> None:
        self.logits, self.whole = group.logits, group.whole
        self.nodes: tuple[int, ...] = ()
        self.rows: Tensor | None = None
        self._group, self._rank = group, rank
        self.parts = parts
        self._sums = 0
        self.norms = 0
        """Sums of the last step that computed the next norm."""
        self.coded = 0
        """Those whose norm was codes."""

    def begin(self, rows: Tensor | None) -> None:
        self._sums, self.norms, self.coded, self.nodes, self.rows = 0, 0, 0, (0,), rows
        if self._rank == 0:
            self.logits.fill_(torch.nan)
        self._meet()
        if self._group.alone:
            return
        sent = self._group.turns[0].rows
        assert (sent is None) == (rows is None)
        if sent is not None and rows is not None:
            rows.copy_(sent)

    def part(self, rows: int) -> Tensor:
        return self.parts[:rows].fill_(torch.nan)

    def reduce(
        self,
        hidden: Tensor,
        post_norm: Norm | None,
        norm: tuple[Norm, Tensor] | None,
        scales: Tensor | None = None,
    ) -> None:
        self._sums += 1
        self.nodes += (self._sums,)
        self._meet()
        ranks = [self] if self._group.alone else self._group.turns
        total = sum_in_order([one.parts[: len(hidden)] for one in ranks])
        if post_norm is not None:
            total = rms_norm(total, post_norm.gain, post_norm.eps)
        hidden.add_(total)
        if norm is not None:
            self.norms += 1
            normed = rms_norm(hidden, norm[0].gain, norm[0].eps)
            if scales is not None:
                self.coded += 1
                found = quantize(normed, WeightFormat("fp8"))
                normed = found.codes
                scales.copy_(found.scales[:, 0])
            norm[1].copy_(normed)
        self._meet()  # before anyone writes the part of the next sum

    def end(self, part: Tensor, column: int) -> None:
        assert self._sums in (0, self._group.sums)
        self.nodes += (self._group.sums + 1,)
        self.logits[: len(part), column : column + part.shape[1]] = part
        self._meet()

    def _meet(self) -> None:
        if not self._group.alone:
            self._group.give_turn(self._rank)
