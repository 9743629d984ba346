"""Thousands of faulty transfers: no foreign byte, no leak, no undetected corruption."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

import pytest

from tests.kvtransfer.adversary.adversary import Adversary
from tests.kvtransfer.adversary.byte_proxy import ByteProxy, WrongDice
from tests.kvtransfer.adversary.fabrics import (
    DeviceFabric,
    Fabric,
    GrpcFabric,
    IpcFabric,
    MemoryFabric,
    PlainDeviceFabric,
)
from tests.kvtransfer.adversary.trials import AT_THE_ENDS, CORRUPTING, Fault
from tests.kvtransfer.support.device_rigs import rig_of

# Each fault once, so that 400 transfers have it ten times: often enough to strike at least once.
EVERY = [*Fault, *[Fault.NONE] * 10]
# Where each connection has faults as well, most transfers have none.
MOSTLY_NONE = [*EVERY, *[Fault.NONE] * 3 * len(EVERY)]
WRONGS = {"none": 2, "cut": 3, "flip": 4, "delay": 2, "crumbs": 1}
FARTHEST = 60_000


def check(adversary: Adversary) -> None:
    counts = adversary.counts
    assert counts.forbidden == []
    assert counts.wrong_records == 0
    assert adversary.sink.foreign_bytes == 0
    assert adversary.source.foreign_bytes == 0


def prove(
    fabric: Fabric, seed: int, transfers: int, struck: Counter[str], kinds: Iterable[str], **how: float
) -> None:
    """Runs trials over a fabric whose links have faults too, of all `kinds`, and checks the totals.
    `how`: an `Adversary`'s."""
    adversary = Adversary(fabric, seed, MOSTLY_NONE if transfers > 1000 else EVERY, **how)  # type: ignore[arg-type]
    adversary.run(transfers)
    print(adversary.counts, struck)
    check(adversary)
    assert all(struck[kind] for kind in kinds if kind != "none"), struck
    adversary.close()


def each_took_effect(adversary: Adversary) -> None:
    """Asserts that each fault that was drawn often enough has struck, and that the receiver counted each
    corruption of a piece."""
    counts = adversary.counts
    missed = [fault.name for fault in Fault if fault is not Fault.NONE and not counts.struck[fault]]
    assert missed == []
    adversary.close()
    for fault in CORRUPTING:
        by_checksum = counts.noticed[fault, "CORRUPTED"]
        assert by_checksum > 0 or fault is Fault.FOREIGN_PIECE  # which is noticed as the other's
        # All that were not noticed by it had ended in another way before the piece was looked at.
        others = {how for other, how in counts.noticed if other is fault} - {"CORRUPTED"}
        assert "committed" not in others
    assert counts.checksum_failures > 0


@pytest.mark.parametrize(
    "transfers", [pytest.param(400, id="400"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
)
def test_in_memory(transfers: int, caplog: pytest.LogCaptureFixture) -> None:
    adversary = Adversary(MemoryFabric(), 11, EVERY)
    with caplog.at_level(logging.INFO, "kvtransfer.sender.sender"):
        adversary.run(transfers)
    print(adversary.counts)
    # A lost credit would end its link some time later, and the totals would be right again.
    assert [line for line in caplog.messages if "no credit came back" in line] == []
    check(adversary)
    each_took_effect(adversary)


@pytest.mark.parametrize(
    "transfers", [pytest.param(150, id="150"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
)
def test_over_grpc(transfers: int) -> None:
    proxy = ByteProxy(WrongDice(5, WRONGS, FARTHEST))
    prove(GrpcFabric(proxy), 12, transfers, proxy.struck, WRONGS)


@pytest.mark.parametrize(
    "transfers", [pytest.param(200, id="200"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
)
def test_over_ipc(transfers: int) -> None:
    fabric = IpcFabric(6)
    prove(fabric, 13, transfers, fabric.struck, fabric.weights)


BETWEEN_DEVICES = pytest.mark.parametrize(
    ("over", "transfers"),
    [
        pytest.param("ipc-fake", 200, id="fake-200"),
        pytest.param("ipc-fake", 10_000, id="fake-10000", marks=pytest.mark.slow),
        pytest.param("ipc-cuda", 1000, id="cuda-1000", marks=pytest.mark.gpu),
        pytest.param("ipc-peer", 1000, id="peer-1000", marks=pytest.mark.multigpu),
    ],
)


@BETWEEN_DEVICES
def test_between_devices(over: str, transfers: int) -> None:
    rig = rig_of(over)
    assert rig is not None
    fabric = DeviceFabric(6, rig)
    prove(fabric, 13, transfers, fabric.struck, fabric.weights)


@BETWEEN_DEVICES
def test_ends_that_fail_while_devices_work(over: str, transfers: int) -> None:
    """Blocks are reused at once, on both sides; a gather or a scatter may be under way."""
    rig = rig_of(over)
    assert rig is not None
    adversary = Adversary(PlainDeviceFabric(6, rig), 14, [*AT_THE_ENDS, *[Fault.NONE] * 10])
    adversary.run(transfers)
    print(adversary.counts)
    check(adversary)
    missed = [fault.name for fault in AT_THE_ENDS if not adversary.counts.struck[fault]]
    assert len(missed) <= (0 if transfers >= 1000 else 2), missed  # each is drawn some eight times of 200
    adversary.close()
