"""Steps of a worker on the host: whole numbers that are right to the last bit or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.engine.parallel.exchange import Exchange
from baton.engine.parallel.exchange_layout import ExchangeShape
from baton.engine.parallel.rank_exchange import ExchangeNodes
from tests.engine.parallel.host.devices import Edit, Hold, HostWorker, Work

WIDTH = 32
DEADLINE_NS = 2_000_000_000
LAUNCHES_A_STEP = 3
"""Besides two for each sum, and one more on the first rank, in a step whose rows are sent."""


@dataclass
class Steps:
    """A worker of `ranks` devices whose steps have the given numbers of sums and rows."""

    ranks: int
    sums: int = 4
    rows: int = 2
    first_step: int = 0
    seed: int = 0
    residency: int = 2
    early: bool = True
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        self.worker = HostWorker(self.ranks, self.seed, self.residency, self.early, self.edits)
        shape = ExchangeShape(self.ranks, self.sums, self.rows, WIDTH, 4, 1 + self.rows)
        self.exchange = Exchange(self.worker.devices, shape, torch.float32)
        if self.first_step:
            self.exchange.set_steps(self.first_step)
        self.hidden = [torch.zeros(self.rows, WIDTH) for _ in range(self.ranks)]
        self.published: list[torch.Tensor] = []
        self.expected: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []
        self._sent: list[torch.Tensor] = []

    def step(
        self,
        tokens: Sequence[int],
        *,
        ranks: Sequence[int] | None = None,
        sent: bool = True,
        sums: bool = True,
    ) -> None:
        """Enqueues a step of these tokens, a row each. `sent`: to the others, by the first rank; else the
        host gives them to each. `sums`: else its logits are what the tokens are."""
        count = len(self.published)
        words = [len(tokens), *tokens, *[0] * (self.rows - len(tokens))]
        # Of all ranks side by side, as parts of a vocabulary are.
        logits = torch.zeros(self.rows, WIDTH * self.ranks)
        published = torch.full_like(logits, -1.0)
        for rank in range(self.ranks) if ranks is None else ranks:
            known = rank == 0 or not sent
            rows = torch.tensor(words if known else [0] * len(words), dtype=torch.int32)
            self._sent.append(rows)
            self._step_of(rank, rows, logits, published, sent, self.sums if sums else 0)
        self.published.append(published)
        self._logits.append(logits)
        self.expected.append(self._expected(words, self.sums if sums else 0))
        assert len(self.published) == count + 1

    def run(self, *holds: Hold) -> int:
        """Runs what is enqueued; returns how many launches did not end."""
        return self.worker.run(holds)

    def outcomes(self) -> list[bool | None]:
        """The outcome of each step: True published and right, False published and wrong, None not
        published."""
        return [
            None if bool((found == -1).all()) else torch.equal(found, expected)
            for found, expected in zip(self.published, self.expected, strict=True)
        ]

    def forget(self) -> None:
        """Forgets the steps that have run."""
        self.published, self.expected, self._logits, self._sent = [], [], [], []

    def launches(self, rank: int) -> int:
        """Launches of a rank in a step."""
        return LAUNCHES_A_STEP + 2 * self.sums + (rank == 0)

    def _step_of(
        self,
        rank: int,
        rows: torch.Tensor,
        logits: torch.Tensor,
        published: torch.Tensor,
        sent: bool,
        sums: int,
    ) -> None:
        hidden, exchange = self.hidden[rank], self.exchange
        nodes = ExchangeNodes(exchange, rank, logits)
        nodes.begin(rows if sent else None)
        self._work(rank, "embed", Work(rows=rows.data_ptr(), hidden=hidden.data_ptr()))
        for node in range(1, sums + 1):
            part = nodes.part(self.rows)
            work = Work(hidden=hidden.data_ptr(), part=part.data_ptr(), number=node, rank=rank)
            self._work(rank, "multiply", work)
            nodes.reduce(hidden, None, None)
        nodes.end(hidden, rank * WIDTH)
        if rank == 0:
            work = Work(
                part=logits.data_ptr(),
                whole=exchange.whole.data_ptr(),
                published=published.data_ptr(),
                number=published.numel(),
            )
            self.worker.add(0, None, "finish", 1, [work])

    def _work(self, rank: int, kernel: str, work: Work) -> None:
        self.worker.add(rank, None, kernel, self.rows, [work])

    def _expected(self, words: Sequence[int], sums: int) -> torch.Tensor:
        """The logits of a step: every rank has the same rows."""
        hidden = torch.zeros(self.rows, WIDTH)
        for row, token in enumerate(words[1 : 1 + words[0]]):
            hidden[row] = token + torch.arange(WIDTH) % 3
        for node in range(1, sums + 1):
            of_row = hidden % 64
            hidden = hidden + sum(of_row * (rank + 1) + node for rank in range(self.ranks))
        return torch.cat([hidden] * self.ranks, dim=1)
