"""The same tokens with drafts as without, by graphs: see `test_same_tokens`. In Triton's interpreter a few
requests beside the plain-torch engine; on a GPU thousands, beside graphs whose slots have one row, in mode
`exact`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from baton.engine.decode.slot_state import SlotState
from baton.engine.speculation.lookahead_cells import BUCKET_BYTES
from services.worker.engine.decode import block_allocation
from tests.engine.crowd import Answer
from tests.engine.speculation.draft_crowd import Job
from tests.engine.speculation.script_table import ScriptTable
from tests.engine.speculation.scripted import LOOKUP, SCRIPTS
from tests.engine.speculation.test_same_tokens import CONTEXT, Engines, random_jobs
from tests.engine.speculation.test_table_same_tokens import again
from tests.engine.test_gpu_requests import check

ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _small_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come for 8 tokens at a time, so that drafts reach the end of a sequence's blocks."""
    monkeypatch.setattr(block_allocation, "ALLOCATION_TOKENS", 8)


class GraphEngines(Engines):
    """Proposers are scripts on the device."""

    shapes = ((8, 24, 140, 12), (3, 40, 240, 320)) if ON_GPU else ((4, 2, 16, 4), (3, 3, 22, 20))
    with_: ClassVar[dict[str, Any]] = {"graph": True}
    without: ClassVar[dict[str, Any]] = {"graph": ON_GPU}

    def _make_proposer(self, state: SlotState) -> ScriptTable:
        return ScriptTable(state, self.draw, CONTEXT)


class LookupEngines(GraphEngines):
    """Drafts are looked up by kernels."""

    scripted = False


class TableEngines(LookupEngines):
    """Drafts are looked up in a lookahead table as well, which becomes full."""

    with_: ClassVar[dict[str, Any]] = {"graph": True, "lookahead_bytes": 40 * BUCKET_BYTES}

    def _with_prediction(self, job: Job, wanted: Answer) -> Job:
        return job


def prove(folder: Path, count: int, seed: int, kind: type[GraphEngines] = GraphEngines) -> GraphEngines:
    engines = kind(folder, "float32", seed, device="cuda" if ON_GPU else "cpu")
    jobs = random_jobs(engines.draw, count, (LOOKUP,) if issubclass(kind, LookupEngines) else tuple(SCRIPTS))
    if kind is TableEngines:
        jobs = again(engines.draw, jobs[: -(-count // 2)], 2, tenants=("a",))
    wanted = engines.without_drafts(jobs)
    for job, answer, one in zip(jobs, engines.with_drafts(jobs, wanted), wanted, strict=True):
        check(job.request, answer, one)
    return engines


@pytest.mark.parametrize(
    ("kind", "seed"), [pytest.param(GraphEngines, 1, marks=pytest.mark.slow), (TableEngines, 6)]
)
def test_a_few_requests(tmp_path: Path, kind: type[GraphEngines], seed: int) -> None:
    engines = prove(tmp_path, 4, seed, kind)
    assert engines.drafts.total() >= engines.accepted.total() > 0
    assert (engines.drafts_shared > 0) == (kind is TableEngines)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 4))
@pytest.mark.parametrize("kind", [GraphEngines, LookupEngines, TableEngines])
def test_a_few_requests_more(tmp_path: Path, seed: int, kind: type[GraphEngines]) -> None:
    prove(tmp_path, 8, seed, kind)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_five_hundred_requests_of_every_kind(tmp_path: Path, seed: int) -> None:
    engines = prove(tmp_path, 500, seed)
    assert engines.swapped_out > 20
    assert engines.moved > 20
    for script in SCRIPTS:
        drafts, accepted = engines.drafts[script], engines.accepted[script]
        assert drafts > 50
        assert accepted > 0 or script in ("wrong", "noise")
    assert engines.accepted["wrong"] == 0
    print(f"{dict(engines.ended)}, {dict(engines.accepted)} of {dict(engines.drafts)} drafts accepted")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", [LookupEngines, TableEngines])
def test_five_hundred_requests_whose_drafts_are_looked_up(tmp_path: Path, kind: type[GraphEngines]) -> None:
    engines = prove(tmp_path, 500, 9, kind)
    assert engines.accepted[LOOKUP] > engines.drafts[LOOKUP] // 4 > 100
    print(f"{dict(engines.ended)}, {dict(engines.accepted)} of {dict(engines.drafts)} drafts accepted")
