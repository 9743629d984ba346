"""What a sender reports to the loop that polls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import BatonError

if TYPE_CHECKING:
    from kvtransfer.sender.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The receiver accepted the commit, over a link of this transport: at `at_ns` of the monotonic clock
    where both are of one host, over ipc, else heard then."""

    transfer: Transfer
    transport: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The transfer will not be committed; its blocks are unpinned."""

    transfer: Transfer
    error: BatonError


SenderEvent = Acknowledged | Failed
