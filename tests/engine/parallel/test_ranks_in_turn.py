from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest
import torch
from torch import Tensor

from baton.engine.parallel.ranks_in_turn import run_in_turn, sum_in_order


def adding(values: Sequence[Tensor], seen: list[Tensor]) -> Generator[Tensor, Tensor, int]:
    """A rank that adds its values to those of the others, one sum after another."""
    for value in values:
        total = yield value
        seen.append(total)
    return len(values)


def test_every_rank_gets_each_sum_in_memory_of_its_own() -> None:
    seen: list[list[Tensor]] = [[], [], []]
    values = [[torch.tensor([float(rank + 10 * node)]) for node in range(4)] for rank in range(3)]
    assert run_in_turn([adding(mine, found) for mine, found in zip(values, seen, strict=True)]) == [4, 4, 4]
    assert [[float(total) for total in mine] for mine in seen] == [[3.0, 33.0, 63.0, 93.0]] * 3
    assert len({total.data_ptr() for mine in seen for total in mine}) == 12


def test_one_rank_gets_its_own_values_back() -> None:
    seen: list[Tensor] = []
    value = torch.tensor([0.1], dtype=torch.bfloat16)
    assert run_in_turn([adding([value], seen)]) == [1]
    assert seen[0] is value


def test_a_rank_that_takes_no_part_in_a_sum_is_told() -> None:
    ranks = [adding([torch.ones(1)] * count, []) for count in (2, 3)]
    with pytest.raises(ValueError, match="1 of 2 ranks take no part in a sum"):
        run_in_turn(ranks)


def test_sums_are_in_order_and_rounded_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert sum_in_order(parts) == 258  # of which bfloat16 would have lost each 1
    wide = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    assert (float(sum_in_order(wide)), float(sum_in_order(wide[::-1]))) == (1.0, 0.0)
    assert sum_in_order([torch.ones(1, dtype=torch.float64)] * 2).dtype == torch.float64
