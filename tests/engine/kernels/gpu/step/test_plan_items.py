"""The kernel that plans a step's attention cuts its rows as the policy says."""

from __future__ import annotations

import pytest
import torch

from baton.engine.kernels.gpu.attention.items import TILE, Items, SplitPolicy
from baton.engine.kernels.gpu.step.plan_items import plan_items
from baton.engine.kernels.gpu.step.step_kernels import CONTROL_WORDS, ROWS
from tests.engine.split_reference import fill_items, split_items

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POLICIES = {
    "whole rows": (SplitPolicy(16), None),
    "long rows": (SplitPolicy(66, 128), None),
    "a window": (SplitPolicy(16, 64), 150),
    "a wave and some": (SplitPolicy(16, 128, wave=5), None),
    "two waves and some": (SplitPolicy(9, 128, wave=3), None),
    "whole waves": (SplitPolicy(4, 64, wave=4), None),
    "fixed parts": (SplitPolicy(fixed=128), None),
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_kernel_cuts_rows_as_the_policy_says(name: str) -> None:
    policy, window = POLICIES[name]
    positions = torch.tensor([700, 0, 64, 1151, 63, 500, 129, 1023], dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(8, generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
    most = policy.most_items(8, int(positions.sum()) + 8)
    planned, expected = (Items(8, most, 2, 1, 16, torch.device(DEVICE)) for _ in range(2))
    fill_items(expected, split_items(positions.tolist(), window, policy), slots, positions)
    control = torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=DEVICE)
    control[ROWS.value] = 8
    plan_items[(1,)](
        control, slots, positions, positions, planned.count, planned.items,
        window or 1 << 30, policy.wanted, policy.shortest, policy.wave,
        ROWS_POWER=16, TILE=TILE, FIXED=policy.fixed or 0, PER_ITEM=1,
    )  # fmt: skip
    assert planned.count.equal(expected.count)
    assert planned.items[:, :7].equal(expected.items[:, :7])


@pytest.mark.parametrize("per_item", [4, 8])
@pytest.mark.parametrize("name", POLICIES)
def test_rows_of_a_slot_are_cut_together(name: str, per_item: int) -> None:
    """Slots of 1 to 8 rows, one whose rows lie on both sides of a tile's end; rows of no slot behind them."""
    policy, window = POLICIES[name]
    slots = [(700, 1), (0, 8), (60, 5), (1151, 2), (63, 1), (500, 3), (129, 7), (1023, 4)]
    runs = [
        (position + done, min(per_item, rows - done))
        for position, rows in slots
        for done in range(0, rows, per_item)
    ]
    positions = torch.tensor(
        [p + r for p, rows in slots for r in range(rows)], dtype=torch.int32, device=DEVICE
    )
    depths = torch.tensor([r for _, rows in slots for r in range(rows)], dtype=torch.int32, device=DEVICE)
    slot_of = torch.tensor([s for s, (_, rows) in enumerate(slots) for _ in range(rows)], device=DEVICE).int()
    rows = len(positions)
    planned, expected = (Items(64, 128, 2, 1, 16, torch.device(DEVICE), per_item) for _ in range(2))
    cut = split_items([p for p, _ in runs], window, policy, [count for _, count in runs])
    fill_items(expected, cut, slot_of, positions)
    control = torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=DEVICE)
    control[ROWS.value] = rows
    # As if they were more rows of the last slot.
    behind = torch.arange(4, 68 - rows, dtype=torch.int32, device=DEVICE)
    plan_items[(1,)](
        control, *(torch.cat((line, behind)) for line in (slot_of, positions, depths)),
        planned.count, planned.items, window or 1 << 30, policy.wanted, policy.shortest, policy.wave,
        ROWS_POWER=64, TILE=TILE, FIXED=policy.fixed or 0, PER_ITEM=per_item,
    )  # fmt: skip
    assert planned.count.equal(expected.count)
    assert planned.items.equal(expected.items)
