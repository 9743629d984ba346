"""The contract suite on each transport; `link_peers` brings them."""

from __future__ import annotations

from tests.kvtransfer.contract.cancel_contract import CancelContract
from tests.kvtransfer.contract.fault_contract import FaultContract
from tests.kvtransfer.contract.happy_contract import HappyContract
from tests.kvtransfer.contract.metadata_contract import DescribedContract
from tests.kvtransfer.contract.opening_contract import OpeningContract
from tests.kvtransfer.contract.resident_contract import HeldContract


class TestHappy(HappyContract): ...


class TestHeld(HeldContract): ...


class TestDescribed(DescribedContract): ...


class TestCancel(CancelContract): ...


class TestFaults(FaultContract): ...


class TestOpening(OpeningContract): ...
