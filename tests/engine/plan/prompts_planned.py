"""Plans of a prefill scheduler by itself, at the time of its own clock."""

from __future__ import annotations

from baton.engine.plan.prefill_scheduler import PrefillScheduler
from baton.engine.plan.step_plan import Chunk


def planned(scheduler: PrefillScheduler, others: int = 0) -> tuple[Chunk, ...]:
    """The next step's chunks, once prompts have their blocks."""
    now = scheduler.clock()
    scheduler.allocate_blocks(now)
    return scheduler.plan(now, others)


def launched(scheduler: PrefillScheduler, others: int = 0) -> tuple[Chunk, ...]:
    """Plans as `planned`, and launches."""
    chunks = planned(scheduler, others)
    scheduler.launched(chunks, scheduler.clock())
    return chunks
