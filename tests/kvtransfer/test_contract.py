"""The contract suite on each transport; `link_peers` brings them."""

from __future__ import annotations

from tests.kvtransfer.cancel_contract import CancelContract
from tests.kvtransfer.described_contract import DescribedContract
from tests.kvtransfer.fault_contract import FaultContract
from tests.kvtransfer.happy_contract import HappyContract
from tests.kvtransfer.held_contract import HeldContract
from tests.kvtransfer.opening_contract import OpeningContract


class TestHappy(HappyContract): ...


class TestHeld(HeldContract): ...


class TestDescribed(DescribedContract): ...


class TestCancel(CancelContract): ...


class TestFaults(FaultContract): ...


class TestOpening(OpeningContract): ...
