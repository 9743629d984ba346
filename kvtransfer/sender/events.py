"""Reports of a sender to the loop that polls it: events, and counters since its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.base.errors import BatonError

if TYPE_CHECKING:
    from kvtransfer.sender.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The receiver accepted the commit, over a link of this transport. `at_ns`: when, by the monotonic clock;
    where the two ends do not share that clock, when the acknowledgement was received."""

    transfer: Transfer
    transport: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The transfer will not be committed; its blocks are unpinned."""

    transfer: Transfer
    error: BatonError


SenderEvent = Acknowledged | Failed


@dataclass(slots=True)
class SenderCounters:
    """Totals since the sender was made, for integrity reports."""

    # Whole blocks given to a wire, by cache group; bytes_shipped is their sum times block_bytes.
    blocks_shipped: list[int]
    bytes_shipped: int = 0
    # Bytes on a wire of blocks that were not completed.
    bytes_abandoned: int = 0
    transfers_acknowledged: int = 0
    transfers_failed: int = 0
    # Answers about transfers that had ended, or are not this sender's.
    dropped_unknown: int = 0
    links_opened: int = 0
    links_broken: int = 0
    # Links over a transport other than the best that both ends have.
    link_fallbacks: int = 0
    # Links over a better transport that replaced one of those.
    links_returned: int = 0
