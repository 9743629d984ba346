"""The exchange among two GPUs and four: sums, logits, steps in graphs, a device that never comes; times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from baton.device.peer_memory import enable_peer_access, plain_bytes
from baton.device.streams.graphs import Recorder
from baton.engine.kernels.fusion import Norm
from baton.engine.parallel.cuda_rank import CudaRank
from baton.engine.parallel.exchange import Exchange, ExchangeTimeoutError
from baton.engine.parallel.exchange_layout import ExchangeShape
from baton.engine.parallel.exchange_source import Constants
from baton.engine.parallel.peer_check import check_peers
from tests.engine.parallel.sum_cases import BF16, EPS, F32, Case, check_logits, check_sums
from tests.support.four_gpus import NEEDS_FOUR

pytestmark = pytest.mark.multigpu

WIDTH = 8192
CASES = [
    Case(2, 8192, BF16, norm=True, rows=1),
    Case(2, 8192, BF16, norm=True, rows=64),
    Case(2, 4096, BF16, norm=True, rows=2048),
    Case(2, 896, BF16, norm=True, rows=33),
    Case(2, 2560, BF16, post_norm=True, norm=True, gains=F32, rows=7),
    Case(2, 8192, BF16, norm=True, codes=True, rows=128),
    Case(2, 5120, F32, norm=True, rows=16),
]


class GpuWorker:
    """The first GPUs of this host."""

    def __init__(self, ranks: int) -> None:
        enable_peer_access(range(ranks))
        self.devices = [CudaRank(rank) for rank in range(ranks)]

    def place(self, rank: int) -> torch.device:
        return torch.device("cuda", rank)

    def run(self) -> int:
        for device in self.devices:
            device.synchronize()
        return 0


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=NEEDS_FOUR)], ids=["two", "four"])
def worker(request: pytest.FixtureRequest) -> GpuWorker:
    return GpuWorker(request.param)


def test_each_reads_what_the_others_wrote(worker: GpuWorker) -> None:
    check_peers(worker.devices, Constants(len(worker.devices), 4096, False, 512))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums(worker: GpuWorker, case: Case) -> None:
    check_sums(replace(case, ranks=len(worker.devices)), worker)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(128256, BF16), (50257, BF16), (151936, F32)])
def test_logits(worker: GpuWorker, vocabulary: int, dtype: torch.dtype) -> None:
    rows = 33
    memory = plain_bytes(0, rows * vocabulary * dtype.itemsize)
    check_logits(vocabulary, dtype, worker, memory.view(dtype).view(rows, vocabulary))


@dataclass
class Rank:
    """Buffers that a rank's steps read and write."""

    hidden: Tensor
    normed: Tensor
    norm: Norm
    rows: Tensor
    part: Tensor


class GraphSteps:
    """Steps of sums of 8,192 elements a row, as a CUDA graph on each device."""

    def __init__(self, worker: GpuWorker, rows: int, sums: int, deadline_s: float = 2.0) -> None:
        self.worker = worker
        self.numbers = range(len(worker.devices))
        shape = ExchangeShape(len(self.numbers), sums, rows, WIDTH, 2, 1 + rows)
        self.exchange = Exchange(worker.devices, shape, BF16, deadline_s)
        width = 128 * len(self.numbers)
        self.logits = plain_bytes(0, rows * width * 2).view(BF16).view(rows, width)
        draw = torch.Generator().manual_seed(rows)
        hidden = torch.randn(rows, WIDTH, generator=draw)
        self.ranks = []
        for number in self.numbers:
            place = worker.place(number)
            self.ranks.append(
                Rank(
                    hidden.to(place, BF16),
                    torch.zeros(rows, WIDTH, dtype=BF16, device=place),
                    Norm(torch.ones(WIDTH, dtype=BF16, device=place), EPS),
                    torch.full((1 + rows,), 5 if number == 0 else 0, dtype=torch.int32, device=place),
                    torch.full((rows, 128), float(number + 1), dtype=BF16, device=place),
                )
            )
            for generation in range(1, min(sums, 3) + 1):
                part = torch.randn(rows, WIDTH, generator=draw) * 0.01
                self.exchange.part(number, generation).copy_(part)
        with self.exchange.solo():
            self.graphs = [self._capture(number) for number in self.numbers]
        self.start = hidden
        self.reset()

    def reset(self) -> None:
        """Rows as they were before the first step."""
        for rank in self.ranks:
            rank.hidden.copy_(self.start)
        self.worker.run()

    def replay(self, *ranks: int) -> None:
        """Enqueues a step on these devices."""
        for rank in ranks:
            with torch.cuda.device(rank):
                self.graphs[rank]()

    def _capture(self, number: int) -> Callable[[], None]:
        rank, exchange = self.ranks[number], self.exchange

        def launch() -> None:
            exchange.begin(number, rank.rows)
            for node in range(1, exchange.shape.sums + 1):
                exchange.reduce(number, node, rank.hidden, norm=(rank.norm, rank.normed))
            exchange.end(number, rank.part, self.logits, 128 * number)

        with torch.cuda.device(number):
            return Recorder(self.worker.place(number)).capture(launch)


@pytest.mark.parametrize("rows", [1, 64])
def test_steps_in_graphs_are_the_same_on_all(worker: GpuWorker, rows: int) -> None:
    steps = GraphSteps(worker, rows, sums=8)
    found = []
    for first in (0, 2**31 - 50, 2**32 - 50):
        if first:
            steps.exchange.set_steps(first)
        steps.reset()
        for _ in range(100):
            steps.replay(*steps.numbers)
        worker.run()
        steps.exchange.check()
        mine, *others = (rank.hidden.cpu() for rank in steps.ranks)
        assert all(mine.equal(other) for other in others)
        assert all(rank.rows.cpu().tolist() == [5] * (1 + rows) for rank in steps.ranks[1:])
        assert int(steps.exchange.whole) == 1
        found.append(mine)
    assert all(one.equal(found[0]) for one in found)
    assert not found[0].equal(steps.start.to(BF16))


@pytest.mark.parametrize("present", [0, 1])
def test_a_device_that_never_comes(present: int) -> None:
    """The other one's step ends at the deadline, and nothing that follows is whole."""
    worker = GpuWorker(2)
    steps = GraphSteps(worker, rows=4, sums=8, deadline_s=0.2)
    for _ in range(10):
        steps.replay(0, 1)
    worker.run()
    steps.exchange.check()
    for _ in range(5):
        steps.replay(present)
    worker.devices[present].synchronize()
    timeout = steps.exchange.timeouts()[0]
    assert (timeout.rank, timeout.peer) == (present, 1 - present)
    assert timeout.node == (1 if present == 0 else 0)
    # The first device tells at a step's begin and sums, others at its sums and end.
    assert (timeout.peer_step, timeout.peer_node) == (timeout.step - 1, 9 - present)
    with pytest.raises(ExchangeTimeoutError):
        steps.exchange.check()
    for _ in range(5):
        steps.replay(1 - present)
    worker.run()
    assert int(steps.exchange.whole) == 0
    steps.replay(0, 1)
    worker.run()
    assert int(steps.exchange.whole) == 0


def test_times(worker: GpuWorker) -> None:
    """Prints, with `-s`, microseconds of a sum with residual and norm of 8,192 elements a row (16 KB), whose
    parts every device reads."""
    for rows in (1, 4, 8, 16, 32, 64, 128, 256):
        steps = GraphSteps(worker, rows, sums=128)
        took = []
        for _ in range(5):
            worker.run()
            began = time.perf_counter()
            for _ in range(20):
                steps.replay(*steps.numbers)
            worker.run()
            took.append((time.perf_counter() - began) / 20 / 128 * 1e6)
        steps.exchange.check()
        size = f"{len(steps.numbers)} GPUs, {rows} rows, {16 * rows} KB"
        print(f"{size}: {sorted(took)[2]:.2f} us a sum, of {[round(one, 2) for one in took]}")
