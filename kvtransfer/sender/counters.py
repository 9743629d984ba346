"""What a sender has counted since its start: plain numbers for audits and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SenderCounters:
    # Whole blocks handed to a wire, by cache group; bytes_shipped is their sum times block_bytes.
    blocks_shipped: list[int]
    bytes_shipped: int = 0
    # Bytes on a wire of blocks that were given up half-way.
    bytes_abandoned: int = 0
    transfers_acknowledged: int = 0
    transfers_failed: int = 0
    dropped_unknown: int = 0
    links_opened: int = 0
    links_broken: int = 0
    # Links made over a slower transport than the receiver's first that this sender has too.
    link_fallbacks: int = 0
    # Links that replaced one of those, over a better transport.
    links_returned: int = 0
