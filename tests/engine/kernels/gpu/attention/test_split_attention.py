"""Split decode attention against the plain-torch kernels: odd shapes, windows, splits, mixed lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.engine.kernels.gpu.attention.items import (
    TILE,
    AttentionTuning,
    Heads,
    Items,
    SplitPolicy,
)
from baton.engine.kernels.gpu.attention.split_attention import split_attention
from tests.engine.split_reference import AttentionCase, fill_items, split_items

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(
    case: AttentionCase,
    policy: SplitPolicy,
    layer: int = 1,
    poison: bool = True,
    tuning: AttentionTuning | None = None,
) -> torch.Tensor:
    heads, rows = case.heads, case.qkv.shape[0]
    positions = case.positions.tolist()
    planned = split_items(positions, heads.window, policy)
    most = policy.most_items(rows, int(sum(positions)) + rows)
    items = Items(rows, most, heads.heads, heads.kv_heads, heads.dim, case.qkv.device)
    fill_items(items, planned, case.slots, case.positions)
    out = torch.full((rows, heads.heads * heads.dim), float("nan"), device=DEVICE, dtype=case.qkv.dtype)
    split_attention(
        out, case.qkv, case.cache, layer, case.table, case.rotary,
        items, heads, case.norms, tuning, kv_scales=case.kv_scales,
    )  # fmt: skip
    assert not items.arrived.any(), "the meeting places are left as they were found"
    return out


CASES = {
    "one token each": (Heads(4, 2, 8, 0.35, 1e-5), [0, 0], 4, False, SplitPolicy()),
    "mixed, odd dim": (Heads(6, 3, 10, 0.3, 1e-5), [1, 63, 64, 65, 130], 16, False, SplitPolicy(4, 64)),
    "many parts": (Heads(2, 1, 16, 0.25, 1e-5), [449, 3], 64, False, SplitPolicy(66, 64)),
    "few rows": (Heads(2, 1, 16, 0.25, 1e-5), [449, 300], 64, False, SplitPolicy.filling(132, 1, 2, 4, True)),
    "a wave and one": (Heads(2, 1, 16, 0.25, 1e-5), [300, 64, 449], 64, False, SplitPolicy(3, 64, wave=2)),
    "window and norms": (Heads(4, 1, 8, 0.35, 1e-6, 70), [200, 69, 70, 5], 4, True, SplitPolicy(3, 64)),
    "fixed parts": (Heads(4, 4, 64, 0.125, 1e-5), [140, 200], 64, False, SplitPolicy(fixed=TILE)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_plain_kernels(name: str) -> None:
    heads, positions, block_tokens, norms, policy = CASES[name]
    case = AttentionCase.random(heads, positions, block_tokens=block_tokens, norms=norms, device=DEVICE)
    expected, cache, _ = case.expected(1)
    torch.testing.assert_close(run(case, policy), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.cache, cache, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name != "window and norms"])
def test_codes_are_read_and_written_with_their_scales(name: str) -> None:
    heads, positions, block_tokens, _, policy = CASES[name]
    case = AttentionCase.random(heads, positions, block_tokens=block_tokens, device=DEVICE).quantised()
    expected, cache, scales = case.expected(1)
    torch.testing.assert_close(run(case, policy), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(case.cache.view(torch.uint8), cache.view(torch.uint8))
    assert case.kv_scales is not None
    assert scales is not None
    assert torch.equal(case.kv_scales, scales)


@pytest.mark.parametrize("policy", [SplitPolicy(1, 64), SplitPolicy(4, 64)], ids=["one part", "parts"])
def test_a_token_before_that_outweighs_the_new_one(policy: SplitPolicy) -> None:
    """Scores far apart, as those of text are: the new token's value fades like all others."""
    heads = Heads(4, 2, 16, 8.0, 1e-5)
    case = AttentionCase.random(heads, [200, 130, 77], block_tokens=64, device=DEVICE).quantised()
    expected, _, _ = case.expected(1)
    torch.testing.assert_close(run(case, policy), expected, rtol=1e-4, atol=1e-4)


def test_unseen_scales_may_be_anything() -> None:
    heads = Heads(4, 2, 16, 0.25, 1e-5, 70)
    case = AttentionCase.random(heads, [200, 66], block_tokens=64, device=DEVICE).quantised()
    expected, _, _ = case.expected(1)
    assert case.kv_scales is not None
    for row, position in enumerate([200, 66]):
        blocks = case.table[int(case.slots[row])].long()
        tokens = torch.arange(len(blocks) * 64, device=DEVICE).view(-1, 64)
        unseen = (tokens >= position) | (tokens <= position - 70)
        part = case.kv_scales[blocks]
        part[:] = torch.where(unseen[:, None, None, :, None], torch.nan, part)
        case.kv_scales[blocks] = part
    torch.testing.assert_close(run(case, SplitPolicy(3, 64)), expected, rtol=1e-5, atol=1e-5)


def test_codes_without_scales_are_refused() -> None:
    case = AttentionCase.random(Heads(4, 2, 8, 0.35, 1e-5), [3], device=DEVICE)
    with pytest.raises(ValueError, match="its scales"):
        run(replace(case, kv_scales=torch.ones(1, device=DEVICE)), SplitPolicy())
    with pytest.raises(ValueError, match="the cache"):
        run(replace(case.quantised(), kv_scales=None), SplitPolicy())


def test_a_shape_that_does_not_fit_is_refused() -> None:
    case = AttentionCase.random(Heads(4, 2, 8, 0.35, 1e-5), [3], device=DEVICE)
    object.__setattr__(case, "qkv", case.qkv[:, 8:].contiguous())
    with pytest.raises(ValueError, match="qkv is"):
        run(case, SplitPolicy())


def test_parts_fill_the_chip_and_cover_each_row_once() -> None:
    policy = SplitPolicy(wanted=66, shortest=128)
    for positions in ([1119], [1119] * 64, [0, 5, 131071, 700], [64, 128, 191, 192]):
        rows = split_items(positions, None, policy)
        assert sum(map(len, rows)) <= policy.most_items(len(positions), 0)
        for position, items in zip(positions, rows, strict=True):
            assert [item.begin for item in items[1:]] == [item.end for item in items[:-1]]
            assert (items[0].begin, items[-1].end) == (0, position + 1)
            assert all(item.begin % TILE == 0 for item in items)


def test_rows_past_a_whole_wave_fill_another() -> None:
    """Two rows of 68 are cut, where 66 run at once; of 96 thirty; of 66, 100 and 132 none."""
    policy = SplitPolicy.filling(132, 8, 96, AttentionTuning(stages=2).resident)
    for rows, cut, parts in ((66, 0, 1), (68, 2, 9), (80, 14, 4), (96, 30, 2), (100, 0, 1), (132, 0, 1)):
        lengths = [len(items) for items in split_items([1151] * rows, None, policy)]
        assert lengths == [1] * (rows - cut) + [parts] * cut
        assert sum(lengths) <= policy.most_items(rows, 0)


def test_two_tiles_are_on_their_way_from_two_programs_a_multiprocessor_on() -> None:
    for heads, rows in ((Heads(32, 8, 128, 0.1, 1e-5), 33), (Heads(28, 4, 128, 0.1, 1e-5), 66)):
        tunings = [AttentionTuning.of(heads, count, 132) for count in (1, rows - 1, rows, 256)]
        assert [tuning.stages for tuning in tunings] == [3, 3, 2, 2]
        assert {(tuning.warps, tuning.registers, tuning.tile) for tuning in tunings} == {(4, 128, TILE)}
    assert AttentionTuning.of(Heads(32, 32, 96, 0.1, 1e-5), 256, 132).stages == 3


def test_few_rows_of_codes_are_cut_for_three_programs_a_multiprocessor() -> None:
    """Rows are cut where they would otherwise leave multiprocessors idle; keys and values in 16 bits as
    ever."""
    heads = Heads(32, 8, 128, 0.1, 1e-5)
    for rows, wanted, tuning in ((1, 49, (4, 3, 128)), (5, 49, (2, 3)), (16, 49, (2, 3)), (24, 16, (4, 3))):
        assert SplitPolicy.filling(132, 8, rows, 4, quantised=True) == SplitPolicy(wanted, wave=66)
        assert AttentionTuning.of(heads, rows, 132, quantised=True) == AttentionTuning(*tuning)
        assert SplitPolicy.filling(132, 8, rows, 3) == SplitPolicy(16, wave=49)
        assert AttentionTuning.of(heads, rows, 132) == AttentionTuning(4, 3, 128)
    assert AttentionTuning.of(heads, 48, 132, quantised=True) == AttentionTuning(4, 3)
    assert AttentionTuning.of(heads, 64, 132, quantised=True) == AttentionTuning(4, 2, registers=128)
    wide = Heads(8, 4, 256, 0.1, 1e-5)  # that many registers would not do
    assert AttentionTuning.of(wide, 128, 132, quantised=True) == AttentionTuning(2, 2)
    cut = split_items([32_767] * 8, None, SplitPolicy.filling(132, 8, 8, 4, quantised=True))
    assert [len(items) for items in cut] == [7] * 8


def test_several_rows_of_wide_heads_take_half_tiles() -> None:
    wide = Heads(8, 4, 256, 0.1, 1e-5)
    assert [AttentionTuning.of(wide, rows, 132).tile for rows in (1, 2, 256)] == [TILE, TILE // 2, TILE // 2]
    codes = [AttentionTuning.of(wide, rows, 132, quantised=True) for rows in (1, 8, 9, 34)]
    assert [(tuning.warps, tuning.tile) for tuning in codes] == [(4, 32), (4, 32), (2, 32), (4, TILE)]
