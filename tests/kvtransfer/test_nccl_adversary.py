"""The adversary over links by NCCL: its double, and on two GPUs NCCL itself."""

from __future__ import annotations

import pytest

from tests.kvtransfer.device_rigs import rig_of
from tests.kvtransfer.nccl_fabric import NcclFabric
from tests.kvtransfer.test_adversary import prove


@pytest.mark.parametrize(
    ("over", "transfers"),
    [
        pytest.param("nccl-played", 3_000, id="played-3000", marks=pytest.mark.slow),
        pytest.param("nccl-peer", 1_000, id="peer-1000", marks=pytest.mark.multigpu),
    ],
)
def test_over_nccl(over: str, transfers: int) -> None:
    rig = rig_of(over, at_once=True)
    assert rig is not None
    fabric = NcclFabric(6, rig)
    prove(fabric, 14, transfers, fabric.struck, fabric.weights)
