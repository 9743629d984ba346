"""The router of a mixture of experts by the kernel, against the reference."""

from __future__ import annotations

import pytest
import torch

from baton.engine.kernels.fusion import Norm
from baton.engine.kernels.gpu.experts.align_rows import Tiles, align_rows
from baton.engine.kernels.gpu.experts.route_rows import RouterSpace, RouterTuning, route_rows
from baton.engine.kernels.gpu.gemm.quantize_rows import quantize_rows
from baton.engine.kernels.reference.experts import route
from baton.engine.kernels.reference.row_ops import rms_norm
from tests.engine.kernels.gpu.experts.routings import DEVICE, as_ids, counts_of, no_rows, normal
from tests.support.fewer import each_value_once

ROUTERS = [RouterTuning(), RouterTuning(rows=1, experts=4)]
# Experts, how many a row takes, and whether their weights are normalised.
SIZES = [(5, 1, False), (60, 4, True), (8, 8, True)]


@pytest.mark.parametrize(
    ("sizes", "tuning", "dtype"),
    [
        *each_value_once(SIZES[:2], ROUTERS, [torch.float32]),
        *each_value_once(SIZES[1:], ROUTERS, [torch.bfloat16]),
        *(
            pytest.param(sizes, tuning, dtype, marks=pytest.mark.slow)
            for sizes, dtype in ((SIZES[2], torch.float32), (SIZES[0], torch.bfloat16))
            for tuning in ROUTERS
        ),
    ],
    ids=str,
)
def test_the_router_is_the_references(
    sizes: tuple[int, int, bool], tuning: RouterTuning, dtype: torch.dtype
) -> None:
    experts, top_k, normalise = sizes
    rows, count, width = 19, 17, 100
    hidden, router = normal(rows, width, dtype=dtype), normal(experts, width, seed=1, dtype=dtype)
    norm = Norm(normal(width, seed=2, dtype=dtype), 1e-6)
    normed, ids = torch.zeros_like(hidden), torch.full((rows, top_k), 77, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros(rows, top_k, device=DEVICE)
    present = count - torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
    space, rows_taken = RouterSpace.empty(rows, experts, DEVICE, tuning), no_rows(experts)
    for _ in range(2):  # the second launch finds the counts of programs as the first one did
        into = normed, ids, weights
        route_rows(*into, hidden, norm, router, present, rows_taken, space, normalise=normalise)
    expected = rms_norm(hidden, norm.gain, norm.eps)
    torch.testing.assert_close(normed[:count], expected[:count])
    numbers, shares = route(normed, router, top_k, normalise=normalise)
    assert torch.equal(ids[:count].long(), numbers[:count])
    assert torch.equal(space.counts, counts_of(ids, experts, tuning.rows))
    assert torch.equal(rows_taken, 2 * space.counts.sum(0))
    torch.testing.assert_close(weights[:count], shares[:count], rtol=1e-5, atol=1e-6)
    assert bool((ids[count:] == -1).all())


@pytest.mark.parametrize(
    ("rows", "count", "experts", "top_k"), [(5, 4, 5, 2), (16, 16, 60, 4), (1, 1, 8, 8), (3, 0, 5, 1)]
)
@pytest.mark.parametrize("tuning", ROUTERS, ids=["tiles", "rows"])
def test_the_router_gathers_few_rows_as_align_rows_does(
    tuning: RouterTuning, rows: int, count: int, experts: int, top_k: int
) -> None:
    """Into tiles that another step has left full."""
    hidden, router = normal(rows, 48), normal(experts, 48, seed=1)
    norm, present = Norm(normal(48, seed=2), 1e-6), count - torch.arange(1, rows + 1, dtype=torch.int32)
    normed, ids = torch.zeros_like(hidden), as_ids(torch.zeros(rows, top_k))
    weights, space = torch.zeros(rows, top_k, device=DEVICE), RouterSpace.empty(rows, experts, DEVICE, tuning)
    into, there = (normed, ids, weights, hidden), present.to(DEVICE)
    found, expected = (Tiles.empty(rows, top_k, experts, DEVICE) for _ in range(2))
    for each in (found.expert, found.entry):
        each.fill_(3)
    for _ in range(2):
        route_rows(*into, norm, router, there, no_rows(experts), space, normalise=True, tiles=found)
    assert not space.arrived.any()
    align_rows(expected, ids, space.counts, space.tuning.rows)
    assert torch.equal(found.expert, expected.expert)
    used = expected.expert >= 0
    assert torch.equal(found.entry[used], expected.entry[used])
    assert int(used.sum()) == int((space.counts.sum(0) > 0).sum()) >= min(count, 1)


@pytest.mark.parametrize("tuning", ROUTERS, ids=["tiles", "rows"])
def test_more_rows_than_a_tile_of_the_router_are_not_gathered(tuning: RouterTuning) -> None:
    hidden, ids = normal(17, 48), as_ids(torch.zeros(17, 2))
    space, tiles = RouterSpace.empty(17, 5, DEVICE, tuning), Tiles.empty(17, 2, 5, DEVICE)
    into = torch.zeros_like(hidden), ids, torch.zeros(17, 2, device=DEVICE), hidden
    present, norm = torch.zeros(17, dtype=torch.int32, device=DEVICE), Norm(normal(48), 1e-6)
    with pytest.raises(ValueError, match=r"17 rows .* are not gathered into tiles of 16"):
        route_rows(*into, norm, normal(5, 48), present, no_rows(5), space, normalise=True, tiles=tiles)


@pytest.mark.parametrize("tuning", ROUTERS, ids=["tiles", "rows"])
def test_of_equal_shares_the_lower_expert_is_taken(tuning: RouterTuning) -> None:
    hidden = normal(4, 64)
    router = normal(1, 64, seed=1).repeat(6, 1)
    ids = torch.zeros(4, 3, dtype=torch.int32, device=DEVICE)
    norm = Norm(torch.ones(64, device=DEVICE), 1e-6)
    present = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros(4, 3, device=DEVICE)
    space, normed = RouterSpace.empty(4, 6, DEVICE, tuning), torch.zeros_like(hidden)
    route_rows(normed, ids, weights, hidden, norm, router, present, no_rows(6), space, normalise=True)
    assert ids.tolist() == [[0, 1, 2]] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tuning", ROUTERS, ids=["tiles", "rows"])
def test_a_row_that_is_no_number_takes_experts_that_there_are(tuning: RouterTuning) -> None:
    """Each once, so that no other row's are displaced, and no weights are read that no expert has."""
    hidden, router, norm = normal(5, 48), normal(6, 48, seed=1), Norm(normal(48, seed=2), 1e-6)
    hidden[1, 7], hidden[3, 9] = torch.nan, torch.inf
    normed, ids = torch.zeros_like(hidden), torch.zeros(5, 4, dtype=torch.int32, device=DEVICE)
    present, space = torch.zeros(5, dtype=torch.int32, device=DEVICE), RouterSpace.empty(5, 6, DEVICE, tuning)
    weights = torch.zeros(5, 4, device=DEVICE)
    route_rows(normed, ids, weights, hidden, norm, router, present, no_rows(6), space, normalise=True)
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(6))
    assert torch.equal(
        space.counts.sum(0).long(), torch.bincount(ids.flatten().cpu(), minlength=6).to(DEVICE)
    )
    assert weights[::2].isfinite().all()


def test_a_row_is_routed_the_same_beside_any_others() -> None:
    """The tiles of prompts agree too, the last of which has one row that holds a token."""
    hidden, router, norm = normal(70, 48), normal(20, 48, seed=1), Norm(normal(48, seed=2), 1e-6)
    for tuning, first in ((ROUTERS[0], 3), (ROUTERS[1], 3), (RouterTuning(rows=64, experts=32), 66)):
        results = []
        for rows in (slice(0, 67), slice(first, first + 1)):
            x = hidden[rows].contiguous()
            normed, ids = torch.zeros_like(x), torch.zeros(len(x), 4, dtype=torch.int32, device=DEVICE)
            weights = torch.zeros(len(x), 4, device=DEVICE)
            space = RouterSpace.empty(len(x), 20, DEVICE, tuning)
            route_rows(
                normed, ids, weights, x, norm, router, torch.zeros_like(ids[:, 0]), no_rows(20),
                space,
                normalise=False,
            )  # fmt: skip
            results.append((normed, ids, weights))
        for together, alone in zip(*results, strict=True):
            assert torch.equal(together[first], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_router_of_one_row_stores_the_codes_of_quantised_rows(dtype: torch.dtype) -> None:
    """Codes and scales are bit for bit those of `quantize_rows`, and experts those of rows that are no codes;
    of rows that are not present nothing is written."""
    hidden, router = normal(19, 100, dtype=dtype), normal(20, 100, seed=1, dtype=dtype)
    norm, present = Norm(normal(100, seed=2, dtype=dtype), 1e-6), 17 - torch.arange(1, 20, dtype=torch.int32)
    normed, ids = torch.zeros_like(hidden), as_ids(torch.zeros(19, 4))
    weights, space = torch.zeros(19, 4, device=DEVICE), RouterSpace.empty(19, 20, DEVICE, ROUTERS[1])
    there = present.to(DEVICE)
    route_rows(normed, ids, weights, hidden, norm, router, there, no_rows(20), space, normalise=True)
    codes, scales = torch.zeros(19, 100, dtype=torch.float8_e4m3fn, device=DEVICE), no_rows(19).float()
    mine, shares = as_ids(torch.zeros(19, 4)), torch.zeros_like(weights)
    route_rows(
        codes, mine, shares, hidden, norm, router, there, no_rows(20), space, normalise=True, scales=scales
    )
    expected, expected_scales = torch.zeros_like(codes), torch.zeros_like(scales)
    quantize_rows(expected, expected_scales, normed, present=there)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert not scales[17:].any()
    assert bool((scales[:17] > 0).all())
    assert torch.equal(mine, ids)
    assert torch.equal(shares[:17], weights[:17])


def test_tiles_of_several_rows_make_no_codes() -> None:
    hidden, space = normal(5, 48), RouterSpace.empty(5, 6, DEVICE)
    ids, weights = as_ids(torch.zeros(5, 2)), torch.zeros(5, 2, device=DEVICE)
    codes, present = torch.zeros(5, 48, dtype=torch.float8_e4m3fn, device=DEVICE), as_ids(torch.zeros(5))
    with pytest.raises(ValueError, match="makes no codes of 5 rows"):
        route_rows(
            codes, ids, weights, hidden, Norm(normal(48), 1e-6), normal(6, 48), present, no_rows(6), space,
            normalise=True, scales=torch.zeros(5, device=DEVICE),
        )  # fmt: skip
