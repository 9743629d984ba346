"""The contract suite on each transport; `link_peers` brings them."""

from __future__ import annotations

from tests.kvtransfer.contract import CancelContract, FaultContract, HappyContract, OpeningContract
from tests.kvtransfer.held_contract import HeldContract


class TestHappy(HappyContract): ...


class TestHeld(HeldContract): ...


class TestCancel(CancelContract): ...


class TestFaults(FaultContract): ...


class TestOpening(OpeningContract): ...
