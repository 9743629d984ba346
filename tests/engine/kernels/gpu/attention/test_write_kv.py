"""Keys and values written ahead of attention have the bits that decode attention of one row writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.engine.kernels.gpu.attention.items import AttentionTuning, Heads, Items, SplitPolicy
from baton.engine.kernels.gpu.attention.split_attention import split_attention
from baton.engine.kernels.gpu.attention.write_kv import write_kv
from tests.engine.split_reference import AttentionCase, fill_items, split_items

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "plain": (Heads(4, 2, 16, 0.25, 1e-5), 16, False),
    "odd size, norms": (Heads(6, 3, 10, 0.3, 1e-6), 4, True),
    "one head, blocks of a tile": (Heads(1, 1, 64, 0.125, 1e-5), 64, True),
}  # fmt: skip
POSITIONS = [0, 15, 16, 130, 63]


def write(case: AttentionCase, rows: int, warps: int = 4) -> None:
    count = torch.tensor([rows], device=case.qkv.device)
    write_kv(
        case.qkv, case.cache, 1, case.table, case.rotary, count, case.slots, case.positions,
        case.heads, case.norms, AttentionTuning(warps), case.kv_scales,
    )  # fmt: skip


def attend(case: AttentionCase, warps: int = 4) -> None:
    """Attention of one row a slot, which writes their keys and values."""
    heads, policy = case.heads, SplitPolicy()
    planned = split_items(case.positions.tolist(), None, policy)
    items = Items(
        len(planned), sum(map(len, planned)), heads.heads, heads.kv_heads, heads.dim, case.qkv.device
    )
    fill_items(items, planned, case.slots, case.positions)
    split_attention(
        torch.empty(len(planned), heads.heads * heads.dim, dtype=case.qkv.dtype, device=case.qkv.device),
        case.qkv, case.cache, 1, case.table, case.rotary, items, heads, case.norms,
        AttentionTuning(warps), kv_scales=case.kv_scales,
    )  # fmt: skip


def same_bits(one: AttentionCase, other: AttentionCase) -> bool:
    scales = one.kv_scales is None or (
        other.kv_scales is not None
        and one.kv_scales.view(torch.int16).equal(other.kv_scales.view(torch.int16))
    )
    return scales and one.cache.view(torch.uint8).equal(other.cache.view(torch.uint8))


def pair(
    heads: Heads, block_tokens: int, norms: bool, codes: bool, dtype: torch.dtype = torch.float32
) -> list[AttentionCase]:
    """The same case twice, each with a cache of its own."""
    cases = []
    for _ in range(2):
        case = AttentionCase.random(
            heads, POSITIONS, block_tokens=block_tokens, norms=norms, device=DEVICE, dtype=dtype
        )
        cases.append(replace(case.quantised(), rotary=case.rotary) if codes else case)
    return cases


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_attention_of_one_row(name: str, codes: bool) -> None:
    heads, block_tokens, norms = CASES[name]
    ahead, within = pair(heads, block_tokens, norms, codes)
    before = ahead.cache.view(torch.uint8).clone()
    write(ahead, len(POSITIONS))
    attend(within)
    assert not before.equal(ahead.cache.view(torch.uint8))
    assert same_bits(ahead, within)


def test_rows_of_no_sequence_write_nothing() -> None:
    heads, block_tokens, norms = CASES["plain"]
    ahead, within = pair(heads, block_tokens, norms, codes=False)
    write(ahead, 0)
    assert same_bits(ahead, within)
    write(ahead, 2)
    rotary = (within.rotary[0][:2], within.rotary[1][:2])
    attend(
        replace(
            within, qkv=within.qkv[:2], slots=within.slots[:2], positions=within.positions[:2], rotary=rotary
        )
    )
    assert same_bits(ahead, within)


def test_rows_of_one_slot_write_side_by_side() -> None:
    """Over the end of a block too; each as if it were the slot's only one."""
    ahead, within = (
        replace(case, slots=case.slots[:1].expand(5).contiguous(), positions=case.positions * 0 + 62)
        for case in pair(*CASES["one head, blocks of a tile"], codes=False)
    )
    ahead.positions.add_(torch.arange(5, dtype=torch.int32, device=DEVICE))
    write(ahead, 5)
    for row in range(5):
        one = slice(row, row + 1)
        rotary = (within.rotary[0][one], within.rotary[1][one])
        attend(
            replace(
                within,
                qkv=within.qkv[one],
                slots=within.slots[one],
                positions=ahead.positions[one],
                rotary=rotary,
            )
        )
    assert same_bits(ahead, within)


def test_what_does_not_fit_is_refused() -> None:
    case = pair(*CASES["plain"], codes=False)[0]
    for wrong, match in (
        (replace(case, qkv=case.qkv[:, 16:].contiguous()), "qkv is"),
        (replace(case, slots=case.slots[:3]), "row_slot is"),
        (replace(case, positions=case.positions.long()), "row_position is"),
        (replace(case, rotary=(case.rotary[0][:2], case.rotary[1][:2])), "rotary is"),
        (replace(case, kv_scales=torch.ones(1, device=DEVICE)), "its scales"),
        (replace(case, table=case.table.long()), "block tables"),
    ):
        with pytest.raises(ValueError, match=match):
            write(wrong, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("warps", [2, 4])
def test_the_bits_are_the_same_on_a_gpu(
    dim: int, dtype: torch.dtype, norms: bool, codes: bool, warps: int
) -> None:
    for heads in (Heads(32, 8, dim, 0.1, 1e-5), Heads(28, 4, dim, 0.1, 1e-6)):
        ahead, within = pair(heads, 64, norms, codes, dtype)
        write(ahead, len(POSITIONS), warps)
        attend(within, warps)
        assert same_bits(ahead, within)
