"""An engine with four rows a slot, beside one with one: growth, swapping, tokens and books."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.engine.shared_memory import step_shape
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.worker_pb2 import GetAuditRequest
from services.common.config.worker import MOST_DRAFTS, EngineConfig
from services.common.engine import rings as rings_module
from services.common.engine.rings import worker_rings
from services.worker.engine import assembly
from services.worker.engine.decode import block_allocation
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

MOST = 60


def drafting(rows: int) -> dict[str, Any]:
    """Settings of an engine with `rows` rows a slot."""
    return {} if rows == 1 else {"speculation": "lookup", "draft_tokens": rows - 1}


def tokens(folder: Path, rows: int) -> list[list[int]]:
    """Two sequences that need more blocks than there are, so that each waits for the other; their tokens."""
    folder.mkdir()
    stepped = SteppedEngine(
        folder, **drafting(rows), reserve_output_tokens=4, kv_blocks=25, host_kv_mb=1, prefix_cache=False
    )
    keys = []
    for name in (b"a", b"b"):
        reserved = stepped.ask(reserve=reserve(name=name, tokens=9, most=MOST)).reserved
        stepped.send(prefill=prefill(reserved.ticket, name=name, tokens=9, most=MOST))
        keys.append((reserved.slot, reserved.generation))
    stepped.run_out()
    report = stepped.ask(report=GetAuditRequest()).report
    assert report.block_grants > 4
    assert report.sequences_swapped_out > 0
    assert report.tokens_decoded == 2 * (MOST - 1)
    stepped.assert_free()
    ended = [record for record in stepped.records if record.finish is not Finish.NONE]
    assert sorted((record.slot, record.generation) for record in ended) == sorted(keys)
    stepped.close()
    drawn = [[r.token for r in stepped.records if (r.slot, r.generation) == key] for key in keys]
    assert [len(each) for each in drawn] == [MOST, MOST]
    return drawn


def test_tokens_and_books_are_those_of_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_allocation, "ALLOCATION_TOKENS", 8)
    assert tokens(tmp_path / "four", 4) == tokens(tmp_path / "one", 1)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_rings_are_as_large_as_rows_need(rows: int) -> None:
    rings = worker_rings(EngineConfig(slots=8, **drafting(rows)))
    assert rings.ring_words == 64 * 8 * rows
    assert worker_rings(EngineConfig(slots=256, **drafting(rows))).ring_words == 64 * 256
    assert rings.mailbox_entries == worker_rings(EngineConfig(slots=8)).mailbox_entries


def test_an_engine_and_a_front_that_disagree_about_rows_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = worker_rings(EngineConfig(slots=2, **drafting(8)))
    monkeypatch.setattr(assembly, "worker_rings", lambda engine: theirs)
    with pytest.raises(BatonError) as refused:
        SteppedEngine(tmp_path, **drafting(4))
    assert refused.value.kind is ErrorKind.INVALID
    assert "rows_per_slot 4" in refused.value.message
    assert "rows_per_slot 8" in refused.value.message
    assert "\n" not in refused.value.message


def test_the_most_drafts_of_the_settings_are_those_of_a_step() -> None:
    assert MOST_DRAFTS == step_shape.MOST_DRAFTS


def test_every_process_takes_the_sizes_of_its_rings_from_one_place() -> None:
    """A front that sized them by itself would read where the engine writes something else."""
    services = Path(rings_module.__file__).parents[2]
    sizing = [path for path in services.rglob("*.py") if "SharedRings(" in path.read_text("utf-8")]
    assert sizing == [Path(rings_module.__file__)]
