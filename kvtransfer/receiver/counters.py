"""What a receiver has counted since its start: plain numbers for audits and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReceiverCounters:
    # Whole blocks that arrived, by cache group; bytes counts every verified piece.
    blocks_received: list[int]
    bytes_received: int = 0
    transfers_committed: int = 0
    # Frames about unknown, forgotten or already ended transfers, duplicates among them.
    dropped_unknown: int = 0
    checksum_failures: int = 0
    links_opened: int = 0
    links_refused: int = 0
    links_broken: int = 0
    links_fenced: int = 0
