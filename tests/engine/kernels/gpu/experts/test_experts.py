"""A step's experts by the kernels, against the reference, for every kind of routing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.expert_tiles import FEW_ROWS, MANY_ROWS, MOST_ROWS, most_tiles
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.experts.align_rows import Tiles, align_rows
from baton.engine.kernels.gpu.experts.combine_rows import combine_rows
from baton.engine.kernels.gpu.experts.grouped_linear import grouped_linear
from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning
from baton.engine.kernels.gpu.gemm.quantize_rows import quantize_rows
from baton.engine.kernels.quantized_weight import Weight, dense
from baton.engine.kernels.reference.experts import mix
from baton.engine.kernels.weight_format import FORMATS, WeightFormat
from baton.engine.kernels.weight_stack import WeightStack
from baton.engine.model.quantization.quantize import quantize
from tests.engine.forced import relative_rms
from tests.engine.kernels.gpu.experts.routings import DEVICE, as_ids, counts_of, normal, routings
from tests.support.fewer import each_value_once

TUNING = GroupedTuning(columns=32, width=32, stages=2, warps=4)
CODES = [
    WeightFormat("fp8"),
    WeightFormat("fp8", 32, 32),
    WeightFormat("int4", scale_columns=32),
    WeightFormat("int4", scale_columns=128, zeros=True),
]


def align(tiles: Tiles, ids: Tensor, experts: int, run: int = 16) -> None:
    """`align_rows` with the counts that a router would have left."""
    align_rows(tiles, ids, counts_of(ids, experts, run), run)


@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "tile_rows", "run"),
    [
        (1, 1, 5, 16, 16),
        (3, 4, 60, 16, 16),
        (17, 2, 8, 16, 16),
        (40, 8, 8, 16, 16),
        (256, 8, 128, 16, 64),
        (70, 2, 3, 64, 64),
        (530, 1, 3, 64, 32),
        (20, 2, 60, 16, 1),
    ],
)
def test_tiles_hold_each_entry_once_in_the_order_of_rows(
    rows: int, top_k: int, experts: int, tile_rows: int, run: int
) -> None:
    for name, routing in routings(rows, top_k, experts).items():
        tiles = Tiles.empty(rows, top_k, experts, DEVICE, tile_rows)
        tiles.expert.fill_(77)
        tiles.entry.fill_(77)
        align(tiles, as_ids(routing), experts, run)
        flat = routing.flatten().tolist()
        expected = [
            (expert, entries[first : first + tile_rows])
            for expert in range(experts)
            if (entries := [entry for entry, one in enumerate(flat) if one == expert])
            for first in range(0, len(entries), tile_rows)
        ]
        assert len(expected) <= most_tiles(rows, top_k, experts, tile_rows) == len(tiles.expert)
        numbers, held = tiles.expert.tolist(), tiles.entry.tolist()
        for tile, (expert, entries) in enumerate(expected):
            assert numbers[tile] == expert, name
            assert held[tile] == entries + [-1] * (tile_rows - len(entries)), name
        for tile in range(len(expected), len(numbers)):
            assert numbers[tile] == -1, name
            assert held[tile] == [-1] * tile_rows, name


def test_too_few_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        align(Tiles.empty(3, 2, 8, DEVICE), torch.zeros(4, 2, dtype=torch.int32, device=DEVICE), 8)


def quantized(weight: Tensor, form: WeightFormat | None) -> Weight:
    return weight if form is None else quantize(weight, form)


@dataclass
class Mixture:
    """Experts with odd widths, and what a step of `rows` rows gives."""

    gate_up: WeightStack
    down: WeightStack
    experts: int
    tuning: GroupedTuning | None = TUNING

    @classmethod
    def random(
        cls, experts: int, hidden: int, inner: int, dtype: torch.dtype, form: WeightFormat | None = None
    ) -> Mixture:
        """`form`: of the experts in fewer bits."""
        gate_up = normal(experts * 2 * inner, hidden, seed=1, dtype=dtype) / hidden**0.5
        down = normal(experts * hidden, inner, seed=2, dtype=dtype) / inner**0.5
        stacks = [WeightStack(quantized(one, form), experts) for one in (gate_up, down)]
        return cls(stacks[0], stacks[1], experts)

    def by_kernels(
        self,
        hidden: Tensor,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate: Epilogue,
        tile_rows: int = FEW_ROWS,
    ) -> Tensor:
        rows, top_k = ids.shape
        tiles = Tiles.empty(rows, top_k, self.experts, DEVICE, tile_rows)
        align(tiles, ids, self.experts)
        inner = x.new_full((tiles.entry.numel(), self.down.shape[2]), torch.nan)
        results = x.new_full((rows * top_k, x.shape[1]), torch.nan)
        grouped_linear(inner, x, self.gate_up, tiles, top_k, gate, self.tuning)
        grouped_linear(results, inner, self.down, tiles, top_k, Epilogue.PLAIN, self.tuning)
        out = hidden.clone()
        combine_rows(out, results, ids, weights)
        return out


@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "dtype", "gate"),
    [
        (1, 2, 5, torch.float32, Epilogue.SWIGLU),
        (3, 4, 60, torch.bfloat16, Epilogue.SWIGLU),
        (17, 1, 5, torch.float32, Epilogue.GEGLU),
        pytest.param(33, 8, 8, torch.float32, Epilogue.SWIGLU, marks=pytest.mark.slow),
        pytest.param(256, 8, 128, torch.bfloat16, Epilogue.SWIGLU, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_routing_gives_what_the_reference_gives(
    rows: int, top_k: int, experts: int, dtype: torch.dtype, gate: Epilogue
) -> None:
    mixture = Mixture.random(experts, 40, 20, dtype)
    x, hidden = normal(rows, 40, seed=3, dtype=dtype), normal(rows, 40, seed=4, dtype=dtype)
    weights = normal(rows, top_k, seed=5).abs()
    for name, routing in routings(rows, top_k, experts).items():
        ids = as_ids(routing)
        found = mixture.by_kernels(hidden, x, ids, weights, gate)
        # Without what they are added to: where the two cancel, a sum is off by the rounding of both.
        expected = mix(x, ids.long(), weights, mixture.gate_up, mixture.down, gate)
        tolerance = 1e-4 if dtype is torch.float32 else 0.06
        torch.testing.assert_close(found - hidden, expected, rtol=tolerance, atol=tolerance, msg=name)
        assert torch.equal(found, mixture.by_kernels(hidden, x, ids, weights, gate)), name
        assert torch.equal(found[ids[:, 0] < 0], hidden[ids[:, 0] < 0]), name
        if rows == 17:
            large = mixture.by_kernels(hidden, x, ids, weights, gate, MANY_ROWS)
            torch.testing.assert_close(large - hidden, expected, rtol=tolerance, atol=tolerance, msg=name)


# Of each size two formats run always: one of 8 bits and one of 4.
SHAPES = [(1, 2, 5, 160, 32), (19, 3, 5, 64, 32)]


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        *each_value_once(CODES, SHAPES),
        *(pytest.param(form, (256, 8, 60, 256, 128), marks=pytest.mark.slow) for form in CODES),
    ],
    ids=str,
)
def test_experts_in_fewer_bits_are_what_their_codes_stand_for(
    form: WeightFormat, shape: tuple[int, int, int, int, int]
) -> None:
    rows, top_k, experts, hidden, inner = shape
    mixture = Mixture.random(experts, hidden, inner, torch.float32, form)
    x, stream, weights = (
        normal(rows, hidden, seed=3),
        normal(rows, hidden, seed=4),
        normal(rows, top_k, seed=5),
    )
    for name, routing in routings(rows, top_k, experts).items():
        ids = as_ids(routing)
        found = mixture.by_kernels(stream, x, ids, weights, Epilogue.SWIGLU)
        expected = stream + mix(x, ids.long(), weights, mixture.gate_up, mixture.down, Epilogue.SWIGLU)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4, msg=name)
        assert torch.equal(found, mixture.by_kernels(stream, x, ids, weights, Epilogue.SWIGLU)), name


@pytest.mark.parametrize("form", [WeightFormat("fp8"), WeightFormat("fp8", 32, 32)], ids=str)
@pytest.mark.parametrize("tile_rows", [FEW_ROWS, MANY_ROWS])
def test_rows_of_codes_give_what_they_stand_for(form: WeightFormat, tile_rows: int) -> None:
    """Experts in fp8 times codes of rows, as the reference multiplies what both stand for."""
    rows, top_k, experts, hidden, inner = 19, 3, 5, 64, 32
    mixture = Mixture.random(experts, hidden, inner, torch.bfloat16, form)
    x, gate = normal(rows, hidden, seed=3, dtype=torch.bfloat16), Epilogue.SWIGLU
    codes = torch.zeros(rows, hidden, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.zeros(rows, device=DEVICE)
    quantize_rows(codes, scales, x)
    stood_for = codes.float() * scales[:, None]
    gate_up = WeightStack(dense(mixture.gate_up.weight, torch.float32), experts)
    for name, routing in routings(rows, top_k, experts).items():
        ids = as_ids(routing)
        tiles = Tiles.empty(rows, top_k, experts, DEVICE, tile_rows)
        align(tiles, ids, experts)
        found, expected = (x.new_full((tiles.entry.numel(), inner), torch.nan) for _ in range(2))
        how = tiles, top_k, gate, GroupedTuning(64, 32, 2, 4)
        grouped_linear(found, codes, mixture.gate_up, *how, x_scales=scales)
        wide = expected.float()
        grouped_linear(wide, stood_for, gate_up, *how)
        there = (tiles.expert >= 0)[:, None] & (tiles.entry >= 0)
        assert relative_rms(found[there.flatten()].float(), wide[there.flatten()]) < 0.02, name


def test_codes_are_refused_where_experts_are_none() -> None:
    stack, tiles = WeightStack(quantize(normal(3 * 48, 64), CODES[2]), 3), Tiles.empty(2, 1, 3, DEVICE)
    codes = torch.zeros(2, 64, dtype=torch.float8_e4m3fn, device=DEVICE)
    with pytest.raises(ValueError, match="2 scales of codes"):
        grouped_linear(normal(64, 24), codes, stack, tiles, 1, Epilogue.SWIGLU, TUNING, x_scales=normal(2))


@pytest.mark.parametrize("form", [WeightFormat("int8"), WeightFormat("fp8", 32, 64)], ids=str)
def test_formats_without_a_kernel_are_refused(form: WeightFormat) -> None:
    """int8, and blocks of scales that an expert ends within."""
    stack = WeightStack(quantize(normal(3 * 2 * 24, 64), form), 3)
    tiles = Tiles.empty(2, 1, 3, DEVICE)
    with pytest.raises(ValueError, match="no kernel for experts of 48 rows in"):
        grouped_linear(normal(64, 24), normal(2, 64), stack, tiles, 1, Epilogue.SWIGLU, TUNING)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    mixture = Mixture.random(5, 40, 20, torch.float32)
    x, hidden, weights = normal(20, 40, seed=3), normal(20, 40, seed=4), normal(20, 2, seed=5)
    ids = as_ids(routings(20, 2, 5)["each to others"])
    together = mixture.by_kernels(hidden, x, ids, weights, Epilogue.SWIGLU)
    for row in (0, 7, 19):
        one = slice(row, row + 1)
        alone = mixture.by_kernels(hidden[one], x[one], ids[one].clone(), weights[one], Epilogue.SWIGLU)
        assert torch.equal(alone[0], together[row])


def as_chosen(
    rows: int, top_k: int, sizes: tuple[int, int, int], dtype: torch.dtype, form: WeightFormat | None
) -> None:
    """Checks the tunings that steps take, by tiles of each size: `sizes` are experts, hidden, inner."""
    mixture = Mixture.random(*sizes, dtype, form)
    mixture.tuning = None
    x, hidden = normal(rows, sizes[1], seed=3, dtype=dtype), torch.zeros(rows, sizes[1]).to(DEVICE, dtype)
    weights = normal(rows, top_k, seed=5)
    for name, routing in routings(rows, top_k, sizes[0]).items():
        ids = as_ids(routing)
        expected = mix(x, ids.long(), weights, mixture.gate_up, mixture.down, Epilogue.SWIGLU)
        for tile_rows in (FEW_ROWS, MANY_ROWS, MOST_ROWS):
            how = Epilogue.SWIGLU, tile_rows
            found = mixture.by_kernels(hidden, x, ids, weights, *how)
            assert bool(found.isfinite().all()), name
            assert relative_rms(found.float(), expected.float()) < 0.02, (name, tile_rows)
            assert torch.equal(found, mixture.by_kernels(hidden, x, ids, weights, *how)), name
            for row in (0, rows // 2, rows - 1):
                one = slice(row, row + 1)
                parts = hidden[one], x[one].clone(), ids[one].clone(), weights[one].clone()
                assert torch.equal(mixture.by_kernels(*parts, *how)[0], found[row]), (name, tile_rows, row)


@pytest.mark.slow
def test_chosen_tunings_of_few_rows() -> None:
    as_chosen(3, 2, (5, 128, 128), torch.float32, WeightFormat("fp8"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form", [None, WeightFormat("fp8"), WeightFormat("fp8", 128, 128), FORMATS["int4"]], ids=str
)
def test_chosen_tunings_at_full_width(form: WeightFormat | None) -> None:
    """Experts as wide as those of Qwen3-30B-A3B, and, of three, as those of Mixtral 8x7B."""
    as_chosen(256, 8, (32, 2048, 768), torch.bfloat16, form)
    as_chosen(70, 2, (3, 4096, 14336), torch.bfloat16, form)


def test_experts_that_no_row_takes_are_not_read() -> None:
    mixture = Mixture.random(5, 40, 20, torch.float32)
    x, hidden, weights = normal(4, 40, seed=3), normal(4, 40, seed=4), normal(4, 2, seed=5)
    ids = as_ids(torch.tensor([[3, 1], [1, 3], [-1, -1], [-1, -1]]))
    clean = mixture.by_kernels(hidden, x, ids, weights, Epilogue.SWIGLU)
    for stack in (mixture.gate_up, mixture.down):
        for expert in (0, 2, 4):
            matrix = stack.matrix(expert)
            assert isinstance(matrix, Tensor)
            matrix.fill_(torch.nan)
    x[2:] = torch.nan
    found = mixture.by_kernels(hidden, x, ids, weights, Epilogue.SWIGLU)
    assert torch.equal(found, clean)
    assert bool(found.isfinite().all())
