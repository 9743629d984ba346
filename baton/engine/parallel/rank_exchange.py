"""A step's exchange, as the step of one rank sees it: its nodes, in the order that all ranks share.

    begin ─ ( part, reduce ) twice a layer ─ end      decode and prefill steps
    begin ─ end                                       logits alone, of rows that a prefill step has computed

All steps of a worker's devices are counted together, in the order in which the host launches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Protocol

from torch import Tensor

from baton.engine.kernels.fusion import Norm
from baton.engine.parallel.exchange import Exchange

Launch = Callable[[], None]
"""Enqueues the work of a step on one device."""

Launches = Iterator[None]
"""Enqueues the work of a step on one device piece by piece: up to its next sum each time it is advanced."""


class RankExchange(Protocol):
    """One rank's nodes of a step. `logits` [R, vocabulary]: of all ranks, in the first one's memory; `whole`
    [1] int32: 1 where all that the last step computed is right; only the first rank's step reads these two.
    """

    logits: Tensor
    whole: Tensor

    def begin(self, rows: Tensor | None) -> None:
        """Enqueues the first node: `rows` [words] int32 goes from the first rank's step to those of the
        others, as their `rows`; the first word is the number of rows. None on all ranks: nothing is sent."""

    def part(self, rows: int) -> Tensor:
        """[rows, width]: where this rank writes its part of the next sum."""

    def reduce(
        self,
        hidden: Tensor,
        post_norm: Norm | None,
        norm: tuple[Norm, Tensor] | None,
        scales: Tensor | None = None,
    ) -> None:
        """Enqueues the next sum: hidden [R, width] += all ranks' parts of it, normed first by `post_norm`;
        and `norm` of that into its tensor [R, width], as codes in e4m3 where there are `scales` [R] float32
        for them."""

    def end(self, part: Tensor, column: int) -> None:
        """Enqueues the last node: `part` [R, n], this rank's logits, goes to `logits` from `column` on; a
        step without logits has no rows. Raises ValueError where the step had sums, but not as many as all
        have."""


class DeviceGroup(Protocol):
    """The devices of one worker, whose steps exchange; `ranks` has the nodes of each. `deadline_s`: the
    longest that one waits for another."""

    ranks: Sequence[RankExchange]
    deadline_s: float

    def solo(self) -> AbstractContextManager[None]:
        """Lets every device run alone within the context, for first launches and captures: see
        `Exchange.solo`."""

    def launch(self, steps: Sequence[Launch]) -> None:
        """Enqueues one step, whose part on each rank is launched by one of `steps`."""

    def launch_in_turns(self, steps: Sequence[Launches]) -> None:
        """Enqueues one step piece by piece, rank by rank: the launches of no device are further ahead of
        those of another than to its next sum, at which it would wait for it."""

    def check(self) -> None:
        """Raises ExchangeTimeoutError where a device has waited for another longer than the deadline; does
        not wait for any."""


class ExchangeNodes:
    """A `RankExchange` by an `Exchange`: what each rank's kernels enqueue on its stream."""

    def __init__(self, exchange: Exchange, rank: int, logits: Tensor) -> None:
        self.logits = logits
        self.whole = exchange.whole
        self._exchange = exchange
        self._rank = rank
        self._sums = 0

    def begin(self, rows: Tensor | None) -> None:
        self._sums = 0
        self._exchange.begin(self._rank, rows)

    def part(self, rows: int) -> Tensor:
        return self._exchange.part(self._rank, self._sums + 1)[:rows]

    def reduce(
        self,
        hidden: Tensor,
        post_norm: Norm | None,
        norm: tuple[Norm, Tensor] | None,
        scales: Tensor | None = None,
    ) -> None:
        self._sums += 1
        self._exchange.reduce(self._rank, self._sums, hidden, post_norm, norm, scales)

    def end(self, part: Tensor, column: int) -> None:
        if self._sums not in (0, self._exchange.shape.sums):
            raise ValueError(f"{self._sums} sums of {self._exchange.shape.sums} in a step")
        self._exchange.end(self._rank, part, self.logits[: part.shape[0]], column)


class ExchangeGroup:
    """A `DeviceGroup` by an `Exchange`."""

    def __init__(self, exchange: Exchange, logits: Tensor, deadline_s: float) -> None:
        """`logits` [R, vocabulary]: memory of the first device that all reach."""
        self.deadline_s = deadline_s
        self.ranks: Sequence[RankExchange] = tuple(
            ExchangeNodes(exchange, rank, logits) for rank in range(exchange.shape.ranks)
        )
        self.exchange = exchange

    def solo(self) -> AbstractContextManager[None]:
        return self.exchange.solo()

    def launch(self, steps: Sequence[Launch]) -> None:
        for step in steps:
            step()

    def launch_in_turns(self, steps: Sequence[Launches]) -> None:
        for _ in zip_longest(*steps):
            pass

    def check(self) -> None:
        self.exchange.check()
