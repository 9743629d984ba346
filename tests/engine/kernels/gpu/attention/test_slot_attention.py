"""Decode attention of several rows a slot against the plain-torch kernels, and against attention of a row an
item."""

from __future__ import annotations

import pytest
import torch

from baton.engine.kernels.gpu.attention.items import (
    TILE,
    AttentionTuning,
    Heads,
    Items,
    SplitPolicy,
    rows_per_item,
)
from baton.engine.kernels.gpu.attention.slot_attention import slot_attention
from tests.engine.kernels.gpu.attention.test_split_attention import run as run_rows
from tests.engine.split_reference import AttentionCase, fill_items, split_items

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Slots = list[tuple[int, int]]


def run(
    case: AttentionCase,
    slots: Slots,
    per_item: int,
    policy: SplitPolicy,
    tuning: AttentionTuning | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """Attends, and writes the keys and values of the slots' rows → [rows, heads · dim]."""
    heads, rows = case.heads, case.qkv.shape[0]
    runs = [
        (position + done, min(per_item, count - done))
        for position, count in slots
        for done in range(0, count, per_item)
    ]
    planned = split_items([p for p, _ in runs], heads.window, policy, [count for _, count in runs])
    most = sum(map(len, planned))
    items = Items(rows, most, heads.heads, heads.kv_heads, heads.dim, case.qkv.device, per_item)
    fill_items(items, planned, case.slots, case.positions)
    out = torch.full((rows, heads.heads * heads.dim), float("nan"), device=DEVICE, dtype=case.qkv.dtype)
    slot_attention(
        out, case.qkv, case.cache, 1, case.table, case.rotary, items, heads, case.norms, tuning,
        programs, kv_scales=case.kv_scales,
    )  # fmt: skip
    assert not items.arrived.any(), "the meeting places are left as they were found"
    return out


POLICY = SplitPolicy(9, 64)
CASES: dict[str, tuple[Heads, Slots, int, int, SplitPolicy]] = {
    "from the first token": (Heads(4, 2, 8, 0.35, 1e-5), [(0, 4), (0, 1), (1, 2)], 4, 4, SplitPolicy()),
    "over a tile, odd dim": (Heads(6, 3, 10, 0.3, 1e-5), [(62, 4), (130, 3), (3, 4)], 4, 64, SplitPolicy()),
    "parts": (Heads(2, 1, 16, 0.25, 1e-5), [(445, 4), (126, 4)], 4, 64, SplitPolicy(66, 64)),
    "eight rows in parts": (Heads(7, 1, 16, 0.25, 1e-5), [(250, 8), (61, 5), (9, 1)], 8, 64, POLICY),
    "eight rows as two items": (Heads(4, 1, 16, 0.25, 1e-5), [(61, 8), (0, 5)], 4, 16, SplitPolicy()),
    "windows and norms": (Heads(4, 1, 8, 0.35, 1e-6, 70), [(198, 4), (66, 4), (5, 2)], 4, 4, POLICY),
    "a window of two": (Heads(3, 1, 16, 0.3, 1e-6, 2), [(127, 8), (62, 4)], 8, 64, SplitPolicy(3, 64)),
    "groups of 16": (Heads(16, 1, 16, 0.25, 1e-5), [(63, 4), (7, 3)], 2, 64, SplitPolicy()),
    "no groups": (Heads(2, 2, 64, 0.125, 1e-5), [(140, 3), (63, 8)], 8, 64, SplitPolicy(fixed=TILE)),
}  # fmt: skip


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_plain_kernels(name: str, codes: bool) -> None:
    heads, slots, per_item, block_tokens, policy = CASES[name]
    case = AttentionCase.of_slots(
        heads, slots, block_tokens=block_tokens, norms="norms" in name and not codes, device=DEVICE
    )
    case = case.quantised() if codes else case
    expected, cache, scales = case.expected(1)
    for tile in (TILE, TILE // 2):
        found = run(case, slots, per_item, policy, AttentionTuning(tile=tile))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if codes:
            assert case.cache.view(torch.uint8).equal(cache.view(torch.uint8))
            assert scales is not None
            assert case.kv_scales is not None
            assert case.kv_scales.equal(scales)
        else:
            torch.testing.assert_close(case.cache, cache, rtol=1e-6, atol=1e-6)


def test_one_row_a_slot_is_attention_of_rows() -> None:
    """The results are equal up to rounding: both cut a row of its own alike, but one joins the new token
    last."""
    heads, policy = Heads(4, 2, 16, 0.25, 1e-5), SplitPolicy(6, 64)
    slots = [(0, 1), (63, 1), (64, 1), (200, 1)]
    case = AttentionCase.of_slots(heads, slots, device=DEVICE)
    torch.testing.assert_close(run(case, slots, 4, policy), run_rows(case, policy), rtol=1e-5, atol=1e-5)


def test_a_row_does_not_see_the_drafts_behind_it() -> None:
    """The drafts' keys and values may be anything that is finite."""
    heads = Heads(4, 2, 16, 0.25, 1e-5)
    case = AttentionCase.of_slots(heads, [(61, 6)], device=DEVICE)
    first = run(case, [(61, 6)], 8, SplitPolicy(3, 64))
    case.qkv[3:, heads.heads * heads.dim :] = 1e4
    later = run(case, [(61, 6)], 8, SplitPolicy(3, 64))
    assert first[:3].equal(later[:3])
    assert not first[3].equal(later[3])


def test_a_run_is_repeated_bit_for_bit() -> None:
    heads, slots, per_item, block_tokens, policy = CASES["eight rows in parts"]
    case = AttentionCase.of_slots(heads, slots, block_tokens=block_tokens, device=DEVICE)
    assert run(case, slots, per_item, policy).equal(run(case, slots, per_item, policy))


@pytest.mark.parametrize("programs", [1, 3])
def test_fewer_programs_do_one_item_after_the_other(programs: int) -> None:
    heads, slots, per_item, block_tokens, policy = CASES["eight rows in parts"]
    case = AttentionCase.of_slots(heads, slots, block_tokens=block_tokens, device=DEVICE)
    expected = run(case, slots, per_item, policy)
    assert run(case, slots, per_item, policy, programs=programs).equal(expected)


def test_items_of_one_row_are_refused() -> None:
    case = AttentionCase.of_slots(Heads(4, 2, 8, 0.35, 1e-5), [(3, 1)], device=DEVICE)
    with pytest.raises(ValueError, match="one row"):
        run(case, [(3, 1)], 1, SplitPolicy())


def test_as_many_rows_are_an_item_as_registers_have_room_for() -> None:
    llama = Heads(32, 8, 128, 0.1, 1e-5)
    assert [rows_per_item(llama, most) for most in (2, 3, 4, 5, 8)] == [2, 4, 4, 4, 4]
    for heads, expected in (
        (Heads(8, 8, 96, 0.1, 1e-5), 8),
        (Heads(28, 4, 128, 0.1, 1e-5), 4),
        (Heads(64, 8, 128, 0.1, 1e-5), 4),
        (Heads(32, 2, 128, 0.1, 1e-5), 2),
        (Heads(8, 4, 256, 0.1, 1e-5), 4),
    ):
        assert rows_per_item(heads, 8) == expected


def test_two_tiles_of_queries_leave_room_for_four_programs_where_there_are_many() -> None:
    llama, wide = Heads(32, 8, 128, 0.1, 1e-5), Heads(16, 2, 256, 0.1, 1e-5)
    few, many = (AttentionTuning.of_slots(llama, slots, 8, 132) for slots in (32, 64))
    assert (few.stages, few.resident, many.stages, many.resident) == (3, 3, 2, 4)
    assert [AttentionTuning(stages=stages, tile=TILE // 2).resident for stages in (3, 4, 5)] == [4, 4, 3]
    assert AttentionTuning.of_slots(llama, 64, 4, 132) == many
    assert AttentionTuning.of_slots(wide, 1, 4, 132).warps == 8
    one_tile = Heads(8, 4, 256, 0.1, 1e-5)
    assert AttentionTuning.of_slots(one_tile, 8, 4, 132, quantised=True) == AttentionTuning(8, 2, 128)
    assert AttentionTuning.of_slots(one_tile, 8, 4, 132) == AttentionTuning()


@pytest.mark.parametrize(
    ("slots", "programs"), [(1, 1), (2, 1), (3, 3), (16, 3), (17, 3), (33, 3), (49, 3), (50, 4)]
)
def test_codes_have_registers_for_as_many_programs_as_there_are(slots: int, programs: int) -> None:
    llama = Heads(32, 8, 128, 0.1, 1e-5)
    for per_item in (4, 8):
        tuning = AttentionTuning.of_slots(llama, slots, per_item, 132, quantised=True)
        assert tuning.resident == programs
        wanted = SplitPolicy.filling(132, 8, slots, tuning.resident, quantised=True).wanted
        assert wanted == (132 * programs // 8 if slots <= 16 else 16)


HALVES = [torch.bfloat16, torch.float16]
SHAPES = {
    "8B": Heads(32, 8, 128, 128**-0.5, 1e-5),
    "28 and 4": Heads(28, 4, 128, 128**-0.5, 1e-6),
    "16 a group": Heads(32, 2, 64, 0.125, 1e-6),
    "no groups": Heads(8, 8, 96, 0.1, 1e-6),
    "wide": Heads(8, 4, 256, 1 / 16, 1e-6),
    "wide, window": Heads(8, 4, 256, 1 / 16, 1e-6, 512),
    "window": Heads(32, 8, 128, 0.1, 1e-5, 1024),
}


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("most", [4, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_half_precision_on_a_gpu(name: str, most: int, dtype: torch.dtype, codes: bool) -> None:
    heads = SHAPES[name]
    slots = [(1119 - most, most), (5, 2), (700, 1), (4000, 3), (62, most), (0, most)]
    case = AttentionCase.of_slots(
        heads, slots, norms=name == "28 and 4" and not codes, device="cuda", dtype=dtype
    )
    case = case.quantised() if codes else case
    expected, _, _ = case.expected(1)
    per_item = rows_per_item(heads, most)
    tuning = AttentionTuning.of_slots(heads, len(slots), per_item, 132, codes)
    found = run(case, slots, per_item, SplitPolicy(33), tuning)
    error = (
        found.float() - expected.float()
    ).square().mean().sqrt() / expected.float().square().mean().sqrt()
    print(
        f"\nPROOF attention of {most} rows a slot, {name}, {dtype}, codes {codes}: relative error {error:.2e}"
    )
    assert error < 5e-3
    assert found.equal(run(case, slots, per_item, SplitPolicy(33), tuning))
