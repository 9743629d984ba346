"""Launches the plan of a step's attention, on any device that has the step's rows."""

from __future__ import annotations

import triton
from torch import Tensor

from baton.engine.decode.gpu_pass import DecodePass
from baton.engine.kernels.gpu.attention.items import TILE
from baton.engine.kernels.gpu.step.plan_items import plan_items
from baton.engine.shared_memory.step_shape import StepShape


def plan_attention(
    pass_: DecodePass, control: Tensor, shape: StepShape, bucket: int, depth: Tensor | None = None
) -> None:
    """Launches the planning of each cache group's attention items, in a step of up to `bucket` rows, whose
    number stands in `control` (`step_kernels`); `depth` of each, where a slot may have several."""
    inputs = pass_.inputs
    of_slots = () if depth is None else pass_.slot_items
    policy = pass_.policy(bucket, several=bool(of_slots))
    for items, heads in zip(of_slots or inputs.items, pass_.heads, strict=True):
        plan_items[(1,)](
            control,
            inputs.slot,
            inputs.position,
            inputs.position if depth is None else depth,
            items.count,
            items.items,
            heads.seen,
            policy.wanted,
            policy.shortest,
            policy.wave,
            ROWS_POWER=step_lanes(shape, bucket),
            TILE=TILE,
            FIXED=policy.fixed or 0,
            PER_ITEM=items.rows_per_item,
            num_warps=4,
        )


def step_lanes(shape: StepShape, bucket: int) -> int:
    """Lanes of a kernel that works on the slots and on up to `bucket` rows: of two sizes at most, since it is
    compiled for each."""
    lanes: int = triton.next_power_of_2(shape.slots if bucket <= shape.slots else shape.rows)
    return lanes
