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
        control, slots, positions, planned.count, planned.items,
        window or 1 << 30, policy.wanted, policy.shortest, policy.wave,
        ROWS_POWER=16, TILE=TILE, FIXED=policy.fixed or 0,
    )  # fmt: skip
    assert planned.count.equal(expected.count)
    assert planned.items[:, :7].equal(expected.items[:, :7])
