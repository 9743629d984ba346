"""What went wrong between Baton and Redis, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Only ever grow. One object a `State`."""

    calls: int = 0
    calls_failed: int = 0
    # Calls past their own deadline: the client with all its connections was given up.
    clients_dropped: int = 0
    outages: int = 0
    renewals_failed: int = 0
    polls_failed: int = 0
    hints_failed: int = 0
    prefix_publishes_failed: int = 0
    # The index had lost a holder, which then sent everything again.
    prefix_resyncs: int = 0
    # Blocks a holder has beyond what the index takes.
    prefix_blocks_refused: int = 0
    journal_batches_failed: int = 0
    # Journal entries and marks that never reach Redis: no room while it is away, or too late.
    journal_dropped: int = 0
    # What lay in Redis and could not be read.
    malformed: int = 0
    # Faults of ours, or of a callback given to us, in a task that was then begun again.
    tasks_failed: int = 0
