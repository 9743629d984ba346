"""The inputs of a prefill step on a device: the same of every step in its own layout as in a graph's."""

from __future__ import annotations

import random
from collections.abc import Sequence as Run

import numpy as np
import pytest
import torch

from baton.engine.kernels.gpu.attention.items import Heads
from baton.engine.kernels.gpu.attention.prompt_items import PromptTuning
from baton.engine.kernels.product_rows import product_rows
from baton.engine.plan.step_plan import Chunk, step_of
from baton.engine.prefill.attention import item_lines
from baton.engine.prefill.attention_plan import KeySplit, plan_attention
from baton.engine.prefill.step_inputs import GroupPlan, InputLayout, StepInputs
from baton.engine.sequence import Limits, SamplingParams, Sequence

BLOCK_TOKENS = (4, 16)
BUFFER = 1024
SPLIT = KeySplit(programs=24, least_keys=20, rows=100, granularity=4)
TUNING = PromptTuning(queries=32)
HEADS = (Heads(4, 2, 8, 0.3, 1e-5), Heads(4, 2, 8, 0.3, 1e-5, 30))


def step(runs: Run[tuple[int, int]]) -> tuple[StepInputs, list[Chunk]]:
    """Chunks of as many sequences, over two cache groups, the second with a window."""
    draw, chunks = random.Random(len(runs)), []
    for start, rows in runs:
        length = start + rows + draw.randint(0, 9)
        tokens = tuple(draw.choices(range(1000), k=length))
        sequence = Sequence(tokens, length, SamplingParams(), Limits(1))
        sequence.blocks = tuple(
            tuple(draw.sample(range(1, 999), -(-length // tokens_a_block))) for tokens_a_block in BLOCK_TOKENS
        )
        chunks.append(Chunk(sequence, start, rows))
    plans = []
    for heads in HEADS:
        plan = plan_attention(runs, None, lambda shape: False)
        if heads.window is None:
            plan = SPLIT.split(plan, TUNING.rows(heads), heads.kv_heads, BUFFER)
        plans.append(GroupPlan(plan, TUNING, item_lines(plan.spans, TUNING.rows(heads), heads.window)))
    return StepInputs(step_of(chunks), product_rows(sum(rows for _, rows in runs)), plans), chunks


def check(made: StepInputs, chunks: list[Chunk], layout: InputLayout) -> None:
    """Everything that kernels read of the step, by the layout, is what its chunks and plans say."""
    reported = made.values(layout)
    run = np.full(layout.size, -7, dtype=np.int32)
    run[: reported.size] = reported
    places = layout.places(torch.from_numpy(run))
    tables = places.tables[:, 0]
    assert places.tables.stride() == (1, 1)
    assert tables[:16].tolist() == [0] * 16, "the scratch block, for rows that are padding"
    row = 0
    for number, chunk in enumerate(chunks):
        assert chunk.sequence.blocks is not None
        for position in range(chunk.start, chunk.start + chunk.count):
            assert places.token[row] == chunk.sequence.token_ids[position]
            assert places.position[row] == position
            for group, places_of, lines in zip(range(2), places.groups, made.lines, strict=True):
                line = int(places_of.line[row])
                assert line == lines[number]
                wanted = chunk.sequence.blocks[group][position // BLOCK_TOKENS[group]]
                assert tables[line + position // BLOCK_TOKENS[group]] == wanted
            row += 1
    assert set(places.token[row:].tolist()) <= {-1}
    assert not places.position[row:].any()
    for places_of, plan, lines in zip(places.groups, made.plans, made.lines, strict=True):
        assert not places_of.line[row:].any()
        items = plan.items.copy()
        items[:, 5] = [lines[table] for table in plan.items[:, 5]]
        assert places_of.items[: len(items)].tolist() == items.tolist()
        assert not places_of.items[len(items) :].any()
        parts = {
            part.row + offset: [part.first + offset, part.rows, part.count, 0]
            for part in plan.attention.parted
            for offset in range(part.rows)
        }
        if places_of.joins is None:
            assert not parts
        else:
            assert places_of.joins.tolist() == [parts.get(n, [0] * 4) for n in range(layout.rows)]


@pytest.mark.parametrize(
    "runs", [[(0, 1)], [(0, 64)], [(100, 3), (0, 70), (7, 1)], [(300, 20), (150, 9)], [(0, 1)] * 40]
)
def test_a_graphs_layout_holds_the_same_as_a_steps_own(runs: list[tuple[int, int]]) -> None:
    made, chunks = step(runs)
    check(made, chunks, made.layout)
    own = made.layout
    assert made.fits(own)
    graphs = InputLayout(own.rows, tuple(5 + items for items in own.items), (True, False), own.entries + 99)
    assert made.fits(graphs)
    check(made, chunks, graphs)
    assert made.values(graphs).size == graphs.size - 99


def test_what_a_layout_has_too_little_of_does_not_fit() -> None:
    made, _ = step([(300, 20), (0, 9)])
    own = made.layout
    assert own.joins == (True, False)
    for less in (
        InputLayout(own.rows + 64, own.items, own.joins, own.entries),
        InputLayout(own.rows, (own.items[0] - 1, own.items[1]), own.joins, own.entries),
        InputLayout(own.rows, (own.items[0], own.items[1] - 1), own.joins, own.entries),
        InputLayout(own.rows, own.items, (False, False), own.entries),
        InputLayout(own.rows, own.items, own.joins, own.entries - 1),
    ):
        assert not made.fits(less)


def test_every_place_begins_at_a_multiple_of_16_bytes() -> None:
    layout = InputLayout(64, (3, 7), (True, False), 48)
    places = layout.places(torch.arange(layout.size, dtype=torch.int32))
    of_groups = [place for group in places.groups for place in (group.line, group.items, group.joins)]
    firsts = [
        int(p.flatten()[0])
        for p in (places.token, places.position, *of_groups, places.tables)
        if p is not None
    ]
    assert [first % 4 for first in firsts] == [0] * len(firsts)
    assert len(set(firsts)) == len(firsts) == 8
    sizes = [p.numel() for p in (places.token, places.position, *of_groups, places.tables) if p is not None]
    assert sum(sizes) == layout.size


def test_a_sequence_without_blocks_is_refused() -> None:
    sequence = Sequence((1, 2), 2, SamplingParams(), Limits(1))
    with pytest.raises(ValueError, match="no blocks"):
        step_of([Chunk(sequence, 0, 2)])


@pytest.mark.parametrize("seed", range(10))
def test_splitting_keys_adds_no_more_items_than_its_bound(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        runs = [
            (draw.choice((0, 50, 5000, 100_000)), draw.randint(1, 200)) for _ in range(draw.randint(1, 9))
        ]
        rows = sum(count for _, count in runs)
        split, item_rows, kv_heads = KeySplit(), draw.choice((8, 16, 32)), draw.choice((1, 2, 8))
        plan = split.split(plan_attention(runs, None, lambda shape: False), item_rows, kv_heads, 4096)
        most = product_rows(rows) // item_rows + len(runs) + split.more_items(kv_heads)
        assert len(item_lines(plan.spans, item_rows, None)) <= most
