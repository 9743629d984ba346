"""Measurements of steps with drafts at a start: attention over slots that no sequence has, which leaves no
trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from baton.engine.decode.occupied_slots import OccupiedSlots, sizes_to_measure
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.shared_memory.step_shape import StepShape
from baton.engine.speculation.size_times import StepSize
from tests.engine.decode.test_draft_steps import LENGTH, PROMPTS, Drafting
from tests.engine.local_engine import LocalEngine

ONE_LAYER = {"num_hidden_layers": 1}


def occupied(loop: GraphDecodeLoop, engine: LocalEngine) -> OccupiedSlots:
    return OccupiedSlots(loop.step_state, engine.state, engine.cache, loop.queue)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_rows_of_a_slot_lie_side_by_side_and_write_to_the_scratch_block(
    tmp_path: Path, numerics: str
) -> None:
    engine = Drafting(tmp_path, 4, numerics=numerics, changes=ONE_LAYER, longest=32).engine
    loop = cast(GraphDecodeLoop, engine.decode)
    slots, step = occupied(loop, engine), loop.step_state
    assert slots.context == 32 - 4, "of a table's tokens, less a slot's rows"
    attention = slots.attention(8, drafts=True)
    slots.occupy(8, 3)
    inputs = step.pass_.inputs
    assert inputs.slot[:8].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert (inputs.position[:8] - slots.context).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert step.draft_rows.depth[:8].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert int(step.control[kernels.ROWS.value]) == 8
    (table,) = engine.state.block_tables
    assert table[:3, :7].min() >= 1
    assert table[:3, :7].max() < len(engine.cache.storage[0])
    assert not table[:, 7:].any()
    before = [block.clone() for block in engine.cache.storage]
    step.pass_.workspace.qkv.fill_(1)
    attention()
    loop.queue.drain()
    items = (step.pass_.slot_items or inputs.items)[0]
    assert int(items.count) >= 3
    assert torch.equal(engine.cache.storage[0][1:], before[0][1:])
    assert not torch.equal(engine.cache.storage[0][0], before[0][0])
    slots.clear()
    assert not table.any()
    assert int(step.control[kernels.ROWS.value]) == 0


def test_steps_with_drafts_are_timed_by_sequences_and_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LocalEngine(tmp_path / "model", changes=ONE_LAYER)
    wanted = plain.run(plain.start(PROMPTS[2], max_tokens=LENGTH))
    drafting = Drafting(tmp_path, 4, numerics="fast", adaptive=True, changes=ONE_LAYER, longest=32)
    engine, loop = drafting.engine, cast(GraphDecodeLoop, drafting.engine.decode)
    graphs = {id(each.simple): rows for rows, each in {**loop.graphs, **loop.draft_graphs}.items()}
    launched: list[Any] = []

    def seconds(step: Any) -> float:
        """1 ms, 10 us for each row, and where attention is alone 1 us for each row and slot."""
        if id(step) in graphs:
            return 0.001 + graphs[id(step)] * 1e-5
        launched.append(step)
        step()
        loop.queue.drain()
        control, slot = loop.step_state.control, loop.step_state.pass_.inputs.slot
        rows = int(control[kernels.ROWS.value])
        return 5e-5 + rows * 1e-6 * len(set(slot[:rows].tolist()))

    monkeypatch.setattr(loop, "seconds_of", seconds)
    loop.measure_costs(engine.cache)
    times = loop.size_times
    assert loop.steps.draft_batches == (8, 12)
    assert times.expected_s(StepSize(12, 3, True)) == pytest.approx(0.001 + 12e-5 + 36e-6)
    assert times.expected_s(StepSize(8, 2, True)) == pytest.approx(0.001 + 8e-5 + 16e-6)
    assert times.expected_s(StepSize(8, 3, True)) == pytest.approx(0.001 + 8e-5 + 24e-6)
    assert times.expected_s(StepSize(3, 3, False)) == pytest.approx(0.001 + 3e-5 + 9e-6)
    assert times.expected_s(StepSize(2, 2, False)) == pytest.approx(0.001 + 2e-5 + 5e-6), "between 1 and 3"
    assert len(launched) == 2 * 2 + (1 + 2) + (1 + 1) + 1, "plain, with drafts, and a copy of the cache"
    assert not engine.step(), "nothing is active"
    key = engine.start(PROMPTS[2], max_tokens=LENGTH)
    drafting.script.begin(key, [*PROMPTS[2], *wanted[0]], "right")
    assert engine.run(key) == wanted


def test_attention_is_measured_between_all_rows_a_slot_and_one() -> None:
    assert sizes_to_measure(64, StepShape(256, 8)) == [8, 32, 64]
    assert sizes_to_measure(256, StepShape(64, 8)) == [32, 64]
    assert sizes_to_measure(8, StepShape(1, 8)) == [1]
    assert sizes_to_measure(12, StepShape(3, 5)) == [3]
    measured = sum(
        1 + len(sizes_to_measure(rows, StepShape(256, 8))) for rows in (8, 16, 32, 64, 96, 128, 192, 256)
    )
    assert measured == 32
