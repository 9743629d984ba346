"""The contract suite on each transport; `link_peers` brings them."""

from __future__ import annotations

from tests.kvtransfer.contract import CancelContract, FaultContract, HappyContract, OpeningContract


class TestHappy(HappyContract): ...


class TestCancel(CancelContract): ...


class TestFaults(FaultContract): ...


class TestOpening(OpeningContract): ...
