"""The same tokens with a lookahead table as without drafts: see `test_same_tokens`. Requests of two tenants
and of no tenant come several times each; the table is large, full, alone, or another process writes into it
meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.speculation.lookahead_cells import BUCKET_BYTES, CELL_WORDS, NO_TOKEN
from baton.engine.speculation.lookahead_table import LookaheadTable
from services.worker.engine.decode import block_allocation
from tests.engine.crowd import Answer
from tests.engine.local_engine import LocalEngine
from tests.engine.speculation.draft_crowd import Job
from tests.engine.speculation.scripted import LOOKUP, VOCAB
from tests.engine.speculation.test_same_tokens import Engines, random_jobs
from tests.engine.test_gpu_requests import check

TENANTS = "a", "b", None
LARGE = 2000 * BUCKET_BYTES
# For each request that comes several times: a few of its keys.
FULL = 5 * BUCKET_BYTES


@pytest.fixture(autouse=True)
def _small_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come for 8 tokens at a time, so that drafts reach the end of a sequence's blocks."""
    monkeypatch.setattr(block_allocation, "ALLOCATION_TOKENS", 8)


class TableEngines(Engines):
    """All drafts are looked up. With `poisoned`, random ids are written into the cells, a word at a time,
    while steps run and outputs are learned."""

    scripted = False
    alone = poisoned = False
    poison_writes = replaced = 0

    def _with_prediction(self, job: Job, wanted: Answer) -> Job:
        return super()._with_prediction(job, wanted) if self.draw.random() < 0.2 else job

    def _beside(self, engine: LocalEngine) -> AbstractContextManager[None]:
        table = engine.state.lookahead
        assert table is not None
        table.alone = self.alone
        return self._watch(table)

    @contextmanager
    def _watch(self, table: LookaheadTable) -> Iterator[None]:
        with self._poison(table) if self.poisoned else nullcontext():
            yield
        self.replaced += table.replaced

    @contextmanager
    def _poison(self, table: LookaheadTable) -> Iterator[None]:
        ended, draw = threading.Event(), random.Random(7)
        cells = table.cells.view(-1, CELL_WORDS)

        def write() -> None:
            while not ended.wait(0.002):
                # Of a copy: `nonzero` counts first, and writes past its result if more are there then.
                used = torch.nonzero(cells[:, 3].clone()).flatten().tolist()
                for number in draw.sample(used, min(len(used), 8)):
                    ids = [draw.randrange(VOCAB) for _ in range(7)]
                    old = cells[number].tolist()
                    words = [one | two << 21 | three << 42 for one, two, three in (ids[:3], ids[3:6])]
                    words.append(old[3] & ~NO_TOKEN | ids[6])
                    cells[number, 0] = reduce(xor, old + words)
                    for place, word in enumerate(words):
                        cells[number, 1 + place] = word
                    self.poison_writes += 1

        thread = threading.Thread(target=write)
        thread.start()
        yield
        ended.set()
        thread.join(10)
        assert not thread.is_alive()


def again(
    draw: random.Random, jobs: list[Job], times: int, tenants: Sequence[str | None] = TENANTS
) -> list[Job]:
    """Repeats each job a number of times, as requests of tenants."""
    repeated = [job for job in jobs for _ in range(times)]
    draw.shuffle(repeated)
    return [replace(job, request=replace(job.request, tenant=draw.choice(tenants))) for job in repeated]


def prove(folder: Path, kind: str, count: int, dtype: str = "float32", seed: int = 1, **how: Any) -> None:
    engines = TableEngines(folder, dtype, seed, **how)
    engines.with_ = {"lookahead_bytes": FULL * count if kind == "full" else LARGE}  # type: ignore[misc]
    engines.alone, engines.poisoned = kind == "alone", kind == "poisoned"
    jobs = again(engines.draw, random_jobs(engines.draw, count, (LOOKUP,)), 3)
    wanted = engines.without_drafts(jobs)
    for job, answer, one in zip(jobs, engines.with_drafts(jobs, wanted), wanted, strict=True):
        check(job.request, answer, one)
    assert engines.drafts_shared > count // 4
    assert engines.accepted_shared > 0 or kind == "poisoned"
    assert not engines.poisoned or engines.poison_writes > count
    assert kind != "full" or engines.replaced > count
    print(
        f"{kind}: {len(jobs)} requests, accepted {engines.accepted_shared} of {engines.drafts_shared} drafts "
        f"of the table, {engines.accepted[LOOKUP]} of {engines.drafts[LOOKUP]} of all; {engines.moved} moved "
        f"and {engines.swapped_out} swapped out, {engines.poison_writes} cells poisoned"
    )


@pytest.mark.parametrize("kind", ["large", "full", "alone", "poisoned"])
def test_requests_that_come_again(tmp_path: Path, kind: str) -> None:
    prove(tmp_path, kind, 5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["large", "full", "alone", "poisoned"])
def test_two_hundred_requests_that_come_again(tmp_path: Path, kind: str, dtype: str) -> None:
    prove(tmp_path, kind, 67, dtype, seed=2)
