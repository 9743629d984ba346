"""Counts of calls to Redis and of their failures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counts since the start; one object per `State`."""

    calls_failed: int = 0
    # Calls past their deadline: the client with all its connections was dropped.
    clients_dropped: int = 0
    outages: int = 0
    renewals_failed: int = 0
    prefix_publishes_failed: int = 0
    # The index had lost a worker's entries, which were then sent again.
    prefix_resyncs: int = 0
    journal_batches_failed: int = 0
    # Journal entries and marks that never reach Redis: the buffer was full, or they came too late.
    journal_dropped: int = 0
    # Values in Redis that could not be parsed.
    malformed: int = 0
    # Exceptions in background tasks, or in their callbacks; the task was restarted.
    tasks_failed: int = 0
