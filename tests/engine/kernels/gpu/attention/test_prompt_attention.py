"""The kernels of a prompt's pass against the plain ones, over odd shapes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from baton.device.attention_library import plain_attention
from baton.engine.kernels.gpu.attention.absorb_attention import absorb_attention
from baton.engine.kernels.gpu.attention.gather_prefix import gather_prefix
from baton.engine.kernels.gpu.attention.items import Heads
from baton.engine.kernels.gpu.attention.join_parts import join_parts
from baton.engine.kernels.gpu.attention.prompt_attention import prompt_attention
from baton.engine.kernels.gpu.attention.prompt_items import PromptTuning
from baton.engine.kernels.gpu.attention.prompt_qkv import prompt_qkv
from baton.engine.kernels.gpu.step.row_ops import embed
from baton.engine.kernels.reference.cache_write import cache_write, token_rows
from baton.engine.kernels.reference.kv_codes import quantise, restore
from baton.engine.kernels.reference.row_ops import apply_rope, rms_norm
from baton.engine.prefill.attention import item_lines
from baton.engine.prefill.attention_plan import Span
from tests.engine.prompt_reference import PromptCase
from tests.engine.split_reference import copied

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LLAMA = Heads(4, 2, 16, 0.25, 1e-5)
CASES = {
    "one row": (LLAMA, [(0, 1)], 16),
    "a tile, and one less and more": (LLAMA, [(0, 64), (63, 2), (64, 1)], 64),
    "behind a prefix": (LLAMA, [(130, 9), (64, 33)], 64),
    "small blocks": (Heads(6, 3, 10, 0.3, 1e-5), [(5, 20), (0, 40), (70, 3)], 4),
    "a dimension of 96": (Heads(2, 1, 96, 0.1, 1e-5), [(60, 20)], 32),
    "no groups": (Heads(3, 3, 8, 0.35, 1e-5), [(20, 30)], 16),
    "a group of three": (Heads(6, 2, 8, 0.35, 1e-5), [(65, 18)], 16),
    "window": (Heads(4, 2, 8, 0.35, 1e-5, 70), [(200, 20), (69, 2), (70, 1), (0, 5)], 16),
    "window within a tile": (Heads(2, 2, 8, 0.35, 1e-5, 3), [(62, 40)], 64),
}  # fmt: skip


def attend(case: PromptCase, spans: list[Span], layer: int = 1) -> tuple[Tensor, Tensor]:
    """Rows of no span are nan."""
    rows, heads = case.qkv.shape[0], case.heads
    out = torch.full((rows, heads.heads * heads.dim), torch.nan, device=DEVICE, dtype=case.qkv.dtype)
    lse = torch.full((heads.heads, rows + 3), torch.nan, device=DEVICE)
    tuning = PromptTuning(queries=64, tile=32 if case.cache.shape[4] == 32 else 64, warps=4, stages=2)
    lines = item_lines(spans, tuning.rows(heads), heads.window)
    items = torch.from_numpy(lines).to(DEVICE)
    scales = case.kv_scales
    prompt_attention(out, case.qkv, case.cache, layer, case.tables, items, heads, tuning, lse, scales)
    return out, lse[:, :rows]


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_softmax_spelled_out(name: str, codes: bool) -> None:
    heads, chunks, block_tokens = CASES[name]
    case = PromptCase.random(heads, chunks, block_tokens=block_tokens, device=DEVICE)
    case = case.quantised() if codes else case
    out, lse = attend(case, case.spans())
    expected, sums = case.expected(1, case.spans())
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), sums, rtol=1e-5, atol=1e-5)


def test_a_span_may_leave_out_keys_before_it_and_all_of_its_own() -> None:
    case = PromptCase.random(LLAMA, [(140, 20), (70, 5)], device=DEVICE)
    spans = [Span(0, 20, 140, 66, 140, 0), Span(20, 5, 70, 70, 75, 1)]
    out, lse = attend(case, spans)
    expected, sums = case.expected(1, spans)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), sums, rtol=1e-5, atol=1e-5)


def test_items_cover_each_row_once_and_the_longest_come_first() -> None:
    spans = [Span(0, 70, 0, 0, 70, 0), Span(70, 33, 500, 0, 533, 1)]
    lines = item_lines(spans, 32, None)
    assert sorted(row for line in lines for row in range(line[0], line[0] + line[1])) == list(range(103))
    lengths = [line[4] - line[3] for line in lines]
    assert lengths == sorted(lengths, reverse=True)
    assert item_lines([], 32, None).shape == (0, 8)


def test_items_of_zeros_do_nothing() -> None:
    case = PromptCase.random(LLAMA, [(130, 9), (0, 3)], device=DEVICE)
    tuning = PromptTuning(queries=64, tile=64, warps=4, stages=2)
    lines = item_lines(case.spans()[:1], tuning.rows(LLAMA), None)
    items = torch.zeros(len(lines) + 5, lines.shape[1], dtype=torch.int32)
    items[2 : 2 + len(lines)] = torch.from_numpy(lines)
    out = torch.full((12, 64), torch.nan, device=DEVICE)
    lse = torch.full((4, 12), torch.nan, device=DEVICE)
    prompt_attention(out, case.qkv, case.cache, 1, case.tables, items.to(DEVICE), LLAMA, tuning, lse)
    expected, sums = case.expected(1, case.spans()[:1])
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse.double().cpu(), sums, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_without_a_token_are_zeros() -> None:
    embedding = torch.randn(9, 20, device=DEVICE)
    token = torch.tensor([3, -1, 0, -1], dtype=torch.int32, device=DEVICE)
    hidden = torch.full((4, 20), torch.nan, device=DEVICE)
    rotary = torch.zeros(4, 3, device=DEVICE), torch.zeros(4, 3, device=DEVICE)
    embed(hidden, rotary, token, torch.zeros_like(token), embedding, torch.ones(3, device=DEVICE), 1.0)
    expected = torch.stack(
        (embedding[3], torch.zeros_like(embedding[0]), embedding[0], torch.zeros_like(embedding[0]))
    )
    torch.testing.assert_close(hidden, expected)


def test_attention_refuses_what_does_not_fit() -> None:
    case = PromptCase.random(LLAMA, [(0, 3)], device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        attend(replace(case, qkv=case.qkv[:, 16:].contiguous()), case.spans())
    with pytest.raises(ValueError, match="block tables"):
        attend(replace(case, tables=case.tables.long()), case.spans())


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dim", [6, 16, 96])
def test_qkv_is_normed_rotated_and_cached(dim: int, norms: bool) -> None:
    heads = Heads(6, 2, dim, 0.3, 1e-5)
    case = PromptCase.random(heads, [(0, 35), (13, 4)], block_tokens=4, device=DEVICE)
    gains = tuple(torch.randn(2, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE))
    rows = case.qkv.shape[0]
    joined = case.qkv.clone().view(rows, -1, dim)
    query, key, value = joined[:, :6], joined[:, 6:8], joined[:, 8:]
    if norms:
        query, key = rms_norm(query, gains[0], 1e-5), rms_norm(key, gains[1], 1e-5)
    query, key = apply_rope(query, *case.rotary), apply_rope(key, *case.rotary)
    cache = case.cache.clone()
    tables = case.tables.long()[case.row_sequence.long()]
    cache_write(cache, 1, key, value, token_rows(cache, tables, case.row_position.long()[:, None])[:, 0])

    prompt_qkv(
        case.qkv, case.cache, 1, case.tables, case.row_sequence, case.row_position, case.rotary, heads,
        (gains[0], gains[1]) if norms else None,
    )  # fmt: skip
    expected = torch.cat((query, key, value), 1).view(rows, -1)
    torch.testing.assert_close(case.qkv, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.cache, cache, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [6, 64, 96, 128])
def test_qkv_is_quantised_and_becomes_what_the_cache_holds(dim: int) -> None:
    heads = Heads(6, 2, dim, 0.3, 1e-5)
    case = PromptCase.random(heads, [(0, 35), (13, 4)], block_tokens=4, device=DEVICE).quantised()
    assert case.kv_scales is not None
    rows, joined = case.qkv.shape[0], case.qkv.clone().view(case.qkv.shape[0], -1, dim)
    cache, scales = copied(case.cache, case.kv_scales)
    tables = case.tables.long()[case.row_sequence.long()]
    places = token_rows(cache, tables, case.row_position.long()[:, None])[:, 0]
    cache_write(cache, 1, joined[:, 6:8], joined[:, 8:], places, scales)
    joined[:, 6:] = restore(*quantise(joined[:, 6:]), torch.float32)

    prompt_qkv(
        case.qkv, case.cache, 1, case.tables, case.row_sequence, case.row_position, case.rotary, heads,
        kv_scales=case.kv_scales,
    )  # fmt: skip
    assert torch.equal(case.qkv, joined.view(rows, -1))
    assert torch.equal(case.cache.view(torch.uint8), cache.view(torch.uint8))
    assert scales is not None
    assert torch.equal(case.kv_scales, scales)


def test_qkv_refuses_what_does_not_fit() -> None:
    case = PromptCase.random(LLAMA, [(0, 3)], device=DEVICE)
    with pytest.raises(ValueError, match="rotary tables"):
        prompt_qkv(
            case.qkv, case.cache, 0, case.tables, case.row_sequence, case.row_position,
            (case.rotary[0][:2], case.rotary[1][:2]), LLAMA,
        )  # fmt: skip
    with pytest.raises(ValueError, match="row_position"):
        prompt_qkv(
            case.qkv, case.cache, 0, case.tables, case.row_sequence, case.row_position[:2], case.rotary, LLAMA
        )


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 70), (64, 64), (17, 130)])
def test_a_prefix_is_gathered(first: int, count: int, codes: bool) -> None:
    case = PromptCase.random(Heads(2, 2, 10, 0.3, 1e-5), [(150, 2), (0, 1)], device=DEVICE)
    case = case.quantised() if codes else case
    out = torch.full((2, 2, 140, 10), torch.nan, device=DEVICE)
    gather_prefix(out, case.cache, 1, case.tables[0], first, count, case.kv_scales)
    torch.testing.assert_close(out[:, :, :count], case.cached(1, 0, first + count)[:, :, first:])
    assert out[:, :, count:].isnan().all()


def test_a_prefix_longer_than_its_blocks_is_refused() -> None:
    case = PromptCase.random(LLAMA, [(40, 2)], device=DEVICE)
    with pytest.raises(ValueError, match="blocks do not hold"):
        gather_prefix(torch.empty(2, 2, 64, 16, device=DEVICE), case.cache, 1, case.tables[0], 0, 64)


def test_parts_of_a_softmax_are_joined() -> None:
    generator = torch.Generator(DEVICE).manual_seed(3)
    query = torch.randn(1, 3, 5, 10, generator=generator, device=DEVICE)
    keys, values = torch.randn(2, 1, 3, 40, 10, generator=generator, device=DEVICE).unbind()
    # One part much likelier than the other: neither may overflow.
    keys[:, :, :7] *= 30
    whole, sums = plain_attention(query, keys, values, 0.3, causal=False)
    parts = [
        plain_attention(query, keys[:, :, a:b], values[:, :, a:b], 0.3, causal=False)
        for a, b in ((0, 7), (7, 8), (8, 40))
    ]
    out = parts[0][0][0].transpose(0, 1).reshape(5, 30).contiguous()
    lse = torch.zeros(3, 9, device=DEVICE)[:, 2:7]
    lse.copy_(parts[0][1][0])
    for part, part_sums in parts[1:]:
        absorb_attention(out, lse, part[0], part_sums[0])
    torch.testing.assert_close(out.view(5, 3, 10).transpose(0, 1), whole[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, sums[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="part_lse"):
        absorb_attention(out, lse, parts[0][0][0], parts[0][1][0].double())


def test_parts_that_stand_below_one_another_are_joined() -> None:
    case = PromptCase.random(LLAMA, [(0, 2), (140, 5), (3, 1)], device=DEVICE)
    cuts = [0, 20, 21, 100, 145]
    spans = [
        Span(2, 5, 140, begin, end, 1, None if end == 145 else 9 + 5 * number)
        for number, (begin, end) in enumerate(pairwise(cuts))
    ]
    tuning = PromptTuning(queries=64, tile=64, warps=4, stages=2)
    items = torch.from_numpy(item_lines(spans, tuning.rows(LLAMA), None)).to(DEVICE)
    out = torch.full((25, 64), torch.nan, device=DEVICE)
    lse = torch.full((4, 26), torch.nan, device=DEVICE)
    prompt_attention(out, case.qkv, case.cache, 1, case.tables, items, LLAMA, tuning, lse)
    joins = torch.zeros(8, 4, dtype=torch.int32)
    for row in range(2, 7):
        joins[row, :3] = torch.tensor((7 + row, 5, 3))
    joins = joins.to(DEVICE)
    join_parts(out, lse, joins, 16)
    expected, sums = case.expected(1, [Span(2, 5, 140, 0, 145, 1)])
    torch.testing.assert_close(out[:8].double().cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse[:, :8].double().cpu(), sums, rtol=1e-5, atol=1e-5, equal_nan=True)
    with pytest.raises(ValueError, match="27 rows are more"):
        join_parts(out, lse, joins.new_zeros(27, 4), 16)
    with pytest.raises(ValueError, match="do not fit"):
        join_parts(out, lse, joins, 8)


def test_the_plain_library_is_torchs_own_attention() -> None:
    query, key, value = (torch.randn(2, heads, 9, 8) for heads in (6, 3, 3))
    out, _ = plain_attention(query, key, value, 8**-0.5, causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
