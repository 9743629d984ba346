"""The prefill pass by kernels against the plain-torch decoder: every family's features, chunkings, edges."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.device.attention_library import library_attention
from baton.engine.kernels.gpu.attention.join_parts import join_parts
from baton.engine.prefill import attention
from baton.engine.prefill.attention_plan import (
    AttentionPlan,
    CallShape,
    KeySplit,
    LibraryRule,
    plan_attention,
)
from tests.engine.prompt_passes import FAMILIES, SMALL_RULE, BothPasses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "family",
    [name if name == "windows" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_logits_and_cache_are_the_plain_decoders(tmp_path: Path, family: str) -> None:
    layers = 2 if family in ("llama", "windows", "gemma3") else 1
    both = BothPasses(tmp_path, family, lengths=(20, 20, 20, 60), most_rows=48, layers=layers, device=DEVICE)
    both.check(
        [(0, 0, 5), (1, 0, 8), (2, 0, 8), (3, 0, 13)],  # short; two alike; the last is padded
        [(0, 5, 1), (2, 8, 9), (3, 13, 20)],
        [(1, 8, 3), (3, 33, 20)],  # pieces of prefix, and what they leave
    )


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "windows"])
def test_a_cache_of_codes(tmp_path: Path, family: str) -> None:
    both = BothPasses(
        tmp_path, family, lengths=(20, 20, 60), most_rows=48, layers=2, device=DEVICE,
        cache_dtype="float8_e4m3fn",
    )  # fmt: skip
    both.check_rounded(
        [(0, 0, 5), (1, 0, 8), (2, 0, 13)],
        [(0, 5, 1), (1, 8, 9), (2, 13, 20)],
        [(2, 33, 20)],  # pieces of prefix, and what they leave
    )


@pytest.mark.parametrize(
    "start", [17, *(pytest.param(edge, marks=pytest.mark.slow) for edge in (15, 16, 33, 48, 49))]
)
def test_prefixes_around_every_edge(tmp_path: Path, start: int) -> None:
    both = BothPasses(tmp_path, lengths=(80, 80), device=DEVICE)
    both.check([(0, 0, start)], [(0, start, 8), (1, 0, 7)], [(0, start + 8, 15)])


@pytest.mark.parametrize(
    "rows", [9, *(pytest.param(edge, marks=pytest.mark.slow) for edge in (1, 6, 7, 8, 17, 64))]
)
def test_chunks_around_every_edge(tmp_path: Path, rows: int) -> None:
    both = BothPasses(tmp_path, lengths=(rows + 30, 80), device=DEVICE)
    both.check([(1, 0, 3), (0, 0, rows)], [(0, rows, 1), (1, 3, 20)])


@pytest.mark.parametrize("rows", [5, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (1, 16))])
def test_few_rows_keys_are_shared_by_several_programs(
    tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def joined(*arguments: Any) -> None:
        counts.append(int((arguments[2][:, 2] > 0).sum()))
        join_parts(*arguments)

    monkeypatch.setattr("baton.engine.prefill.attention.join_parts", joined)
    both = BothPasses(tmp_path, rule=None, lengths=(80, 20, 100), device=DEVICE)
    both.check([(0, 0, 60), (2, 0, 61)])
    assert counts == []
    both.check([(1, 0, 7), (0, 60, rows), (2, 61, 3)])
    assert counts == [rows + 3]


@pytest.mark.parametrize("block_tokens", [pytest.param(32, marks=pytest.mark.slow), 5])
def test_blocks_of_any_size_without_a_library(tmp_path: Path, block_tokens: int) -> None:
    both = BothPasses(tmp_path, rule=None, block_tokens=block_tokens, lengths=(80, 80), device=DEVICE)
    both.check([(0, 0, 33), (1, 0, 1)], [(0, 33, 31), (1, 1, 20)])


def test_random_packings(tmp_path: Path) -> None:
    draw = random.Random(5)
    both = BothPasses(tmp_path, lengths=(20, 13, 25, 17), most_rows=24, device=DEVICE)
    done = [0, 0, 0, 0]
    while any(done[n] < sequence.length for n, sequence in enumerate(both.sequences)):
        chunks, room = [], 24
        for number in draw.sample(range(4), 4):
            left = both.sequences[number].length - done[number]
            count = min(left, room, draw.choice((0, 1, 7, 8, 16, 23, 40)))
            if count:
                chunks.append((number, done[number], count))
                done[number] += count
                room -= count
        if chunks:
            both.check(chunks)


def test_what_overflowed_in_one_prompt_stays_there(tmp_path: Path) -> None:
    """Padding is not what an earlier pass has left, nor another sequence's rows."""
    both = BothPasses(tmp_path, lengths=(32, 32), device=DEVICE)
    both.kernels.workspace.qkv.fill_(torch.nan)
    both.check([(0, 0, 13)])


@pytest.mark.slow
def test_a_library_that_refuses_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choosy(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Any:
        if not causal:
            raise RuntimeError("no engine for this graph")
        return library_attention(query, key, value, scale, causal=causal)

    monkeypatch.setattr(attention, "library_attention", choosy)
    both = BothPasses(tmp_path, lengths=(80,), most_rows=40, device=DEVICE)
    assert both.kernels.refused == sum(1 for shape in SMALL_RULE.shapes(40) if not shape.causal)
    both.check([(0, 0, 40)], [(0, 40, 20)])


def test_warming_up_writes_scratch_alone(tmp_path: Path) -> None:
    both = BothPasses(tmp_path, lengths=(20,), most_rows=12, device=DEVICE)
    both.kernels.warm()
    assert all(not group[1:].any() for group in both.caches[1].groups)
    both.check([(0, 0, 12)])


def test_a_pass_too_large_is_refused(tmp_path: Path) -> None:
    both = BothPasses(tmp_path, lengths=(20,), most_rows=8, device=DEVICE)
    with pytest.raises(ValueError, match="a pass of 9 rows"):
        both.run([(0, 0, 9)])


def plan(*chunks: tuple[int, int]) -> AttentionPlan:
    return plan_attention(chunks, SMALL_RULE, set(SMALL_RULE.shapes(128)).__contains__)


def test_the_library_gets_what_is_long_enough() -> None:
    assert [call.batch for call in plan((0, 64), (0, 64)).causal] == [2]
    assert plan((0, 64), (0, 64)).alone is not None
    assert plan((0, 63), (0, 3)).causal == []  # cannot be padded: another's rows are behind it
    assert plan((0, 3), (0, 63)).causal[0].rows == 64
    assert plan((0, 5)).spans != []
    assert plan((15, 30)).causal == []
    behind = plan((50, 30))
    assert [(call.first, call.keys, call.rows, call.real) for call in behind.prefix] == [
        (0, 32, 32, 30),
        (32, 16, 32, 30),
    ]
    assert [(span.begin, span.end) for span in behind.spans] == [(48, 50)]
    assert behind.causal[0].joins


def test_a_prefix_is_worth_a_call_by_its_rows() -> None:
    rule = LibraryRule.of(2048)
    for rows, least in ((384, 21846), (2048, 4096)):
        assert rule.least_start(rows) == least
        assert plan_attention([(least, rows)], rule, lambda shape: True).prefix != []
        below = plan_attention([(least - 1, rows)], rule, lambda shape: True)
        assert (below.prefix, below.causal, len(below.spans)) == ([], [], 1)
        alone = plan_attention([(0, rows)], rule, lambda shape: True)
        assert (len(alone.causal), len(alone.spans)) == ((1, 0) if rows >= rule.least_alone else (0, 1))


def test_only_shapes_that_are_ready_are_called_for() -> None:
    def ready(shape: CallShape) -> bool:
        return shape.causal

    assert plan_attention([(48, 16)], SMALL_RULE, ready).prefix == []
    assert plan_attention([(48, 16)], SMALL_RULE, ready).causal == []
    assert len(plan_attention([(48, 16)], SMALL_RULE, lambda shape: True).prefix) == 2
    assert plan_attention([(48, 8 * 64 + 1)], SMALL_RULE, lambda shape: True).prefix == []
    assert plan_attention([(0, 64)], SMALL_RULE, lambda shape: False).causal == []
    assert plan_attention([(0, 64)], None, lambda shape: True).causal == []


@pytest.mark.parametrize("most", [1, 256, 300, 2000, 2048, 4096, 8192, 20000])
def test_shapes_are_few_and_calls_read_within_the_slack(most: int) -> None:
    rule = LibraryRule.of(most)
    shapes = list(rule.shapes(most))
    assert len(set(shapes)) == len(shapes) < 100
    ready, slack = set(shapes), rule.slack(most)
    for rows in {1, most, *range(1, most, 97)}:
        for start in (0, 16384 + 8192 + 4096 + 2048):
            plan = plan_attention([(start, rows)], rule, ready.__contains__)
            assert bool(plan.causal) == (rows >= (rule.least_rows if start else rule.least_alone))
            assert len(plan.prefix) == (4 if start and rows >= rule.least_rows else 0)
            ends = [call.row + call.batch * call.rows for call in plan.causal]
            ends += [call.row + call.rows for call in plan.prefix]
            assert max(ends, default=0) <= rows + slack


def test_a_hundred_rows_far_into_a_prompt_are_work_for_all_of_a_gpu() -> None:
    for rows, start in ((100, 100_000), (228, 50_000), (16, 100_000), (300, 100_000)):
        plan = KeySplit().split(plan_attention([(start, rows)], None, lambda shape: True), 16, 8, 2048)
        longest = max(span.end - span.begin for span in plan.spans)
        programs = -(-rows // 16) * 8 * len(plan.spans)
        assert 0.6 * 528 <= programs <= 528, (rows, programs)
        assert longest <= 1.3 * (start + rows) / len(plan.spans) + 256
    for rows, start in ((1000, 1000), (500, 0), (2000, 3000)):
        whole = plan_attention([(start, rows)], None, lambda shape: True)
        assert KeySplit().split(whole, 32, 8, 2048) == whole


@pytest.mark.parametrize("seed", range(20))
def test_every_row_sees_every_key_once(seed: int) -> None:
    draw = random.Random(seed)
    chunks = [(draw.choice((0, 0, 15, 16, 40, 100)), draw.choice((1, 7, 8, 9, 24, 24, 31))) for _ in range(5)]
    split = KeySplit(
        programs=draw.choice((4, 30, 300)), least_keys=6, rows=50, granularity=draw.choice((1, 4))
    )
    found = split.split(plan(*chunks), draw.choice((4, 16)), 2, 128)
    written = [
        (span.row if span.into is None else span.into) + n for span in found.spans for n in range(span.rows)
    ]
    assert len(written) == len(set(written))
    assert max((span.into + span.rows for span in found.spans if span.into is not None), default=0) <= 178
    parts = {part.first + n * part.rows: part.row for part in found.parted for n in range(part.count)}
    assert parts == {span.into: span.row for span in found.spans if span.into is not None}
    seen: dict[int, list[int]] = {}
    for span in found.spans:
        for row in range(span.rows):
            keys = range(span.begin, min(span.end, span.position + row + 1))
            seen.setdefault(span.row + row, []).extend(keys)
    first_rows = {sum(rows for _, rows in chunks[:n]): start for n, (start, _) in enumerate(chunks)}
    for call in found.causal:
        for number in range(call.batch):
            row = call.row + number * call.rows
            for offset in range(call.real):
                start = first_rows[row]
                seen.setdefault(row + offset, []).extend(range(start, start + offset + 1))
    for piece in found.prefix:
        for row in range(piece.row, piece.row + piece.real):
            seen.setdefault(row, []).extend(range(piece.first, piece.first + piece.keys))
    row = 0
    for start, rows in chunks:
        for offset in range(rows):
            assert sorted(seen[row]) == list(range(start + offset + 1))
            row += 1
