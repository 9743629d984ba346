"""Steps whose slots have four rows, three of them empty, beside those of one row: the same tokens and books.
Positions are published as the output ring reports tokens."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from baton.engine.decode.graph_step import StepGraphs
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.output_ring import Finish
from baton.engine.shared_memory.slot_progress import position_tag
from services.worker.engine.decode import block_allocation
from tests.engine.crowd import Answer, Crowd
from tests.engine.local_engine import CONFIG, LocalEngine
from tests.engine.test_gpu_requests import Size, random_requests

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [list(range(5, 5 + n)) for n in (1, 3, 4, 5, 16, 17, 33)]
DRAWN = SamplingParams(0.9, seed=2**63 + 11)
FILTERED = SamplingParams(0.9, 20, 0.95, seed=7, logprobs=2)
Key = tuple[int, int]


def plain(folder: Path, **options: Any) -> LocalEngine:
    return LocalEngine(folder / "model", device=DEVICE, **options)


def graph(folder: Path, **options: Any) -> LocalEngine:
    return LocalEngine(folder / "model", device=DEVICE, graph=True, rows_per_slot=4, **options)


def assert_published(engine: LocalEngine, key: Key, prompt_length: int) -> None:
    """The position is that of the last token that the ring has reported, or a later one: at once, or since a
    step's words are seen one by one, soon."""
    read = prompt_length - 1 + len(engine.output[key])
    until = time.monotonic() + 1.0
    while (engine.decode.progress.position(*key) or prompt_length) < read:
        assert time.monotonic() < until, "a step has ended and its position is not published"


def test_four_rows_draw_the_tokens_of_one(tmp_path: Path) -> None:
    """One joins while two run; one grows; one is cancelled."""
    expected = plain(tmp_path)
    wanted = [
        expected.run(expected.start(PROMPTS[n], max_tokens=4, sampling=sampling))[0]
        for n, sampling in ((3, SamplingParams()), (1, DRAWN), (4, FILTERED))
    ]
    engine = graph(tmp_path, slots=3)
    growing = engine.start(PROMPTS[3], max_tokens=4, capacity=len(PROMPTS[3]) + 1)
    drawn = engine.start(PROMPTS[1], max_tokens=4, sampling=DRAWN)
    while not engine.reader.stalled_rows:
        engine.step()
        assert_published(engine, growing, len(PROMPTS[3]))
    assert engine.decode.progress.position(*growing) == len(PROMPTS[3]) + 1
    engine.extend(growing, len(PROMPTS[3]) + 1, len(PROMPTS[3]) + 3)
    cancelled = engine.start(PROMPTS[2], max_tokens=30)
    engine.decode.cancel(*cancelled)
    assert engine.run(growing, drawn, cancelled)[:2] == wanted[:2]
    assert engine.finish[cancelled] is Finish.CANCELLED
    engine.slots.release(*cancelled)
    last = engine.start(PROMPTS[4], max_tokens=4, sampling=FILTERED)
    assert last[0] == cancelled[0]
    assert engine.decode.progress.position(*last) is None, "the slot's word is that of its last tenant"
    assert engine.run(last) == wanted[2:]
    assert engine.decode.progress.position(*last) == len(PROMPTS[4]) + 3


@pytest.mark.parametrize("rows", [1, 4])
def test_launched_steps_take_a_sequence_further_by_what_its_steps_gave_out(tmp_path: Path, rows: int) -> None:
    engine = LocalEngine(tmp_path / "model", device=DEVICE, graph=True, slots=2, rows_per_slot=rows)
    loop = cast(GraphDecodeLoop, engine.decode)
    key = engine.start(PROMPTS[1], max_tokens=20)
    while len(engine.output[key]) < 3:
        engine.step()
    while loop.steps.queued:
        loop.observe()
    nothing = StepGraphs(simple=lambda: None, samples=lambda: None)
    loop.graphs = dict.fromkeys(loop.graphs, nothing)  # steps that never end
    for launched in range(3):
        published = loop.progress.position(*key)
        assert published is not None
        assert loop.furthest_tags()[key[0]] == position_tag(key[1], published + launched)
        assert loop.furthest_tags(6)[key[0]] == position_tag(key[1], published + launched + 6)
        loop.launch(DecodeRows(2))


def test_costs_at_a_start_are_by_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without drafts have a row a sequence, however many rows a slot may have."""
    engine = LocalEngine(tmp_path / "model", device=DEVICE, graph=True, slots=3, rows_per_slot=4)
    loop = cast(GraphDecodeLoop, engine.decode)
    seconds = {id(loop.graphs[rows].simple): rows / 1e3 for rows in loop.graphs}
    monkeypatch.setattr(loop, "seconds_of", lambda step: seconds.get(id(step), 1.0))
    assert loop.bucket_seconds() == {1: 0.001, 2: 0.002, 3: 0.003}
    costs = loop.measure_costs(engine.cache)
    assert costs.decode_s(1, 0) == 0.001
    assert costs.decode_s(3, 0) == 0.003


def test_steps_of_four_rows_a_slot_join_prompts(tmp_path: Path) -> None:
    """Steps that join prompts have no drafts, and so one row a sequence."""
    expected = plain(tmp_path)
    wanted = [
        expected.run(expected.start(PROMPTS[n], max_tokens=most))[0] for n, most in ((1, 5), (5, 3), (2, 4))
    ]
    engine = graph(tmp_path, slots=4, mixed="eager")
    assert list(engine.decode.mixed) == [4]
    keys = [engine.start(PROMPTS[n], max_tokens=most) for n, most in ((1, 5), (5, 3), (2, 4))]
    assert engine.mixed_steps >= 2
    assert engine.run(*keys) == wanted


def test_a_masked_slot_of_four_rows_waits_for_its_mask(tmp_path: Path) -> None:
    engine = graph(tmp_path, slots=2)
    beside = engine.start(PROMPTS[1], max_tokens=4)
    key = engine.start(PROMPTS[1], max_tokens=3, masked=True)
    mask = np.zeros(-(-int(CONFIG["vocab_size"]) // 32), dtype=np.uint32)
    for number, token in enumerate((40, 41)):
        held = engine.reader.stalled_rows
        while engine.reader.stalled_rows == held:
            engine.step()
        assert len(engine.output[key]) == 1 + number
        mask[:] = 0
        mask[token // 32] = 1 << token % 32
        engine.decode.write_masks([(*key, len(PROMPTS[1]) + 1 + number, mask)])
    assert engine.run(key, beside)[0][1:] == [40, 41]


class WatchedCrowd(Crowd):
    """A crowd whose published positions are compared with what the ring reports, each turn."""

    def watch(self) -> None:
        for _, reservation in self._running.values():
            assert_published(self.engine, reservation.key, reservation.token_count)


def answers(folder: Path, size: Size, how: dict[str, Any]) -> list[Answer]:
    """Runs requests that grow, are swapped out and in, and cancelled; checks that everything is free after
    them."""
    draw = random.Random(7)
    requests = random_requests(draw, size)
    engine = LocalEngine(folder / "model", slots=size.slots, blocks=size.blocks, **how)
    crowd = WatchedCrowd(engine, reserve=size.reserve, host_blocks=4 * size.blocks)
    ended = crowd.run(requests, draw, join=0.9, each_turn=crowd.watch)
    crowd.assert_all_free()
    counts = crowd.counts(ended)
    assert counts.allocations > size.requests
    assert counts.swapped_out > size.requests // 50
    assert counts.cancelled > size.requests // 20
    return ended


def assert_same(one: list[Answer], other: list[Answer]) -> None:
    """The same tokens and ends; of a request that was cancelled, as many tokens as both have."""
    for mine, its in zip(one, other, strict=True):
        shorter = min(len(mine.tokens), len(its.tokens))
        assert mine.tokens[:shorter] == its.tokens[:shorter]
        if Finish.CANCELLED not in (mine.finish, its.finish):
            assert (len(mine.tokens), mine.finish) == (len(its.tokens), its.finish)


@pytest.fixture
def _small_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come for 8 tokens at a time, so that sequences grow often."""
    monkeypatch.setattr(block_allocation, "ALLOCATION_TOKENS", 8)


@pytest.mark.usefixtures("_small_allocations")
def test_growth_and_swapping_by_published_positions(tmp_path: Path) -> None:
    size = Size(24, 6, 40, 24, 40, 4, graph=False)
    assert_same(*(answers(tmp_path, size, {"rows_per_slot": rows}) for rows in (1, 4)))


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_small_allocations")
def test_four_rows_a_slot_on_a_gpu(tmp_path: Path) -> None:
    """300 requests in mode `exact`, by graphs of as many rows and of four times as many."""
    size = Size(300, 24, 300, 60, 64, 2, graph=True)
    how = {"device": "cuda", "graph": True, "chunk": 256}
    assert_same(*(answers(tmp_path, size, {**how, "rows_per_slot": rows}) for rows in (1, 4)))
