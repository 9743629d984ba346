"""Sums of the exchange, with norms and codes of the same kernel, beside the reference, for any devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.kernels.fusion import Norm
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.parallel.exchange import Exchange, RankDevice
from baton.engine.parallel.exchange_layout import ExchangeShape
from baton.engine.parallel.ranks_in_turn import sum_in_order

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-5


class Worker(Protocol):
    """Devices, and how what is launched on them runs."""

    @property
    def devices(self) -> Sequence[RankDevice]:
        """The devices of the ranks, one each."""

    def place(self, rank: int) -> torch.device:
        """The device of a rank's tensors."""

    def run(self) -> int:
        """Runs what is launched; returns how many launches did not end."""


@dataclass(frozen=True)
class Case:
    """Ranks, and what a sum's kernel does besides."""

    ranks: int
    width: int
    dtype: torch.dtype
    post_norm: bool = False
    norm: bool = False
    codes: bool = False
    gains: torch.dtype | None = None
    rows: int = 3


class Rank:
    """The tensors of one rank."""

    def __init__(self, case: Case, hidden: Tensor, norms: Sequence[Tensor], place: torch.device) -> None:
        self.case = case
        self.hidden = hidden.to(place, copy=True)
        self.post_norm, self.norm = (Norm(gain.to(place), EPS) for gain in norms)
        dtype = torch.float8_e4m3fn if case.codes else case.dtype
        self.normed = torch.zeros(hidden.shape, dtype=dtype, device=place)
        self.scales = torch.zeros(case.rows, device=place)

    def launch(self, exchange: Exchange, rank: int, node: int) -> None:
        """Enqueues one sum of the exchange."""
        exchange.reduce(
            rank,
            node,
            self.hidden,
            self.post_norm if self.case.post_norm else None,
            (self.norm, self.normed) if self.case.norm else None,
            self.scales if self.case.codes else None,
        )


def check_sums(case: Case, worker: Worker) -> None:
    """Two sums, one after the other."""
    shape = ExchangeShape(case.ranks, 2, case.rows, case.width, case.dtype.itemsize, 1)
    exchange = Exchange(worker.devices, shape, case.dtype)
    draw = torch.Generator().manual_seed(case.width)

    def random(*size: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*size, generator=draw).to(dtype)

    hidden = random(case.rows, case.width)
    gains = [1 + random(case.width, dtype=case.gains or case.dtype) for _ in range(2)]
    ranks = [Rank(case, hidden, gains, worker.place(rank)) for rank in range(case.ranks)]
    with exchange.solo():
        begin(worker, exchange)
        for number, rank in enumerate(ranks):
            rank.launch(exchange, number, 1)
        assert worker.run() == 0
    for rank in ranks:
        rank.hidden.copy_(hidden)
    begin(worker, exchange)
    for node in (1, 2):
        parts = [random(case.rows, case.width) for _ in ranks]
        for number, part in enumerate(parts):
            exchange.part(number, node).copy_(part)
        assert worker.run() == 0
        for number, rank in enumerate(ranks):
            rank.launch(exchange, number, node)
        assert worker.run() == 0
        exchange.check()
        check_rows(ranks, hidden, parts, gains)
        hidden = ranks[0].hidden.cpu().clone()


def check_rows(
    ranks: Sequence[Rank], hidden: Tensor, parts: Sequence[Tensor], gains: Sequence[Tensor]
) -> None:
    """Rows of all ranks beside the reference, and beside one another."""
    first, case = ranks[0], ranks[0].case
    total = sum_in_order([part.float() for part in parts])
    if case.post_norm:
        total = rms_norm(total.to(case.dtype), gains[0], EPS).float()
    hidden = (hidden.float() + total).to(case.dtype)
    mine, scales = first.hidden.cpu(), first.scales.cpu()
    # A rounding the other way, of sums in another order: one unit of the last place.
    rtol, atol = (2**-7, 2**-6) if case.dtype is BF16 else (1e-5, 1e-5)
    torch.testing.assert_close(mine, hidden, rtol=rtol, atol=atol)
    if not case.post_norm:
        assert mine.equal(hidden), "a sum without a norm has the reference's bits"
    expected = rms_norm(mine, gains[1], EPS).float()
    found = first.normed.cpu().float() * (scales[:, None] if case.codes else 1)
    if case.codes:
        torch.testing.assert_close(scales, expected.abs().amax(1) / 448, rtol=2**-7, atol=0)
        rtol, atol = 2**-4, 2**-6
    if case.norm:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    for rank in ranks[1:]:
        assert rank.hidden.cpu().equal(mine), "not the same bits on all ranks"
        assert rank.normed.cpu().view(torch.uint8).equal(first.normed.cpu().view(torch.uint8))
        assert rank.scales.cpu().equal(scales)


def check_logits(vocabulary: int, dtype: torch.dtype, worker: Worker, logits: Tensor) -> None:
    """Parts of logits [R, vocabulary] meet in the first rank's memory; the last part is shorter where the
    ranks do not divide the vocabulary."""
    ranks = len(worker.devices)
    exchange = Exchange(worker.devices, ExchangeShape(ranks, 2, 1, 32, dtype.itemsize, 1), dtype)
    whole = torch.randn(logits.shape).to(dtype)
    each = -(-vocabulary // ranks)
    parts = [
        whole[:, rank * each : (rank + 1) * each].contiguous().to(worker.place(rank)) for rank in range(ranks)
    ]

    def step() -> None:
        begin(worker, exchange)
        for rank, part in enumerate(parts):
            exchange.end(rank, part, logits, rank * each)
        assert worker.run() == 0

    with exchange.solo():
        step()
    logits.zero_()
    step()
    exchange.check()
    assert logits.cpu().equal(whole)
    assert int(exchange.whole) == 1


def begin(worker: Worker, exchange: Exchange) -> None:
    """A step of no rows begins on all ranks."""
    rows = [
        torch.zeros(1, dtype=torch.int32, device=worker.place(rank)) for rank in range(len(worker.devices))
    ]
    for rank, words in enumerate(rows):
        exchange.begin(rank, words)
    assert worker.run() == 0
