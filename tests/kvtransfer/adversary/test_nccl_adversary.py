"""The adversary over links by NCCL: its double, and on two GPUs NCCL itself."""

from __future__ import annotations

import pytest

from baton.device.nccl.nccl_library import Communicator
from tests.kvtransfer.adversary.adversary import TIMEOUT_S
from tests.kvtransfer.adversary.nccl_fabric import NcclFabric
from tests.kvtransfer.adversary.test_adversary import prove
from tests.kvtransfer.conftest import nccl_has_begun
from tests.kvtransfer.support.device_rigs import rig_of


@pytest.mark.parametrize(
    ("over", "transfers"),
    [
        pytest.param("nccl-fake", 3_000, id="fake-3000", marks=pytest.mark.slow),
        pytest.param("nccl-peer", 1_000, id="peer-1000", marks=pytest.mark.multigpu),
    ],
)
def test_over_nccl(over: str, transfers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(over, at_once=True)
    assert rig is not None
    fabric, timeout_s = NcclFabric(6, rig), TIMEOUT_S
    if over == "nccl-peer":  # a link takes NCCL a tenth of a second to make, and half a second to end
        nccl_has_begun()
        fabric.weights, timeout_s = {"none": 30, "cut": 1, "channel": 2, "window": 3}, 5.0
        # Here one loop has both ends. What is freed waits for all receives on the device, and a launch with
        # it: so for one whose send that same loop has yet to enqueue. Two processes have two loops.
        monkeypatch.setattr(Communicator, "abort", lambda link: link.call("ncclCommRevoke", 0))
    prove(fabric, 14, transfers, fabric.struck, fabric.weights, timeout_s=timeout_s)
