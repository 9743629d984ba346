"""A step's plain data: what it takes from its chunks, and one on scratch alone."""

from __future__ import annotations

from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.plan.step_plan import Chunk, step_of
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.model_spec.layout import CacheGroup, Layout, Plane


def test_a_step_has_the_data_of_its_chunks() -> None:
    sequences = [Sequence(tuple(range(10, 10 + n)), n, SamplingParams(), Limits(1)) for n in (7, 5)]
    for number, sequence in enumerate(sequences):
        sequence.blocks = ((1 + number, 3 + number),)
    step = step_of([Chunk(sequences[0], 2, 4), Chunk(sequences[1], 0, 5)])
    assert (step.rows, step.runs) == (9, [(2, 4), (0, 5)])
    assert [chunk.token_ids for chunk in step.chunks] == [(12, 13, 14, 15), (10, 11, 12, 13, 14)]
    assert [chunk.blocks for chunk in step.chunks] == [((1, 3),), ((2, 4),)]


def test_a_step_on_scratch_has_no_other_block() -> None:
    planes = (Plane("k", "float32", 1, 4), Plane("v", "float32", 1, 4))
    layout = Layout((CacheGroup((0,), planes, 4, None), CacheGroup((1,), planes, 4, 8)))
    step = PrefillStep.on_scratch(layout, 5, [7, 9, 8, 7, 1, 2])
    assert (step.rows, step.runs) == (6, [(5, 6)])
    (chunk,) = step.chunks
    assert chunk.blocks == ((0, 0, 0), (0, 0, 0))
    assert chunk.token_ids == (7, 9, 8, 7, 1, 2)
