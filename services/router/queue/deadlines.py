"""Refuses calls at once whose own deadline surely comes before their first token.

These refusals are always on, so none may be wrong: the time in the queue is judged by how fast it was
drained lately, with a margin for chance, and as if all running requests could end at once; the prompt counts
only where no worker can have it cached. What was not measured yet refuses nothing.
"""

from __future__ import annotations

from baton.base.errors import BatonError, ErrorKind
from services.router.queue.drain_rate import DrainRate
from services.router.queue.request_order import Ahead

# Least part of a prompt's predicted time that it takes.
CAUTION = 0.8
_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 0.1, 60.0


def check_deadline(left_s: float, ahead: Ahead, drain: DrainRate, slots: int, own_s: float) -> None:
    """Raises BatonError(DEADLINE) where a call with `left_s` until its deadline cannot have its first token.

    `ahead`: what is placed before it. `slots`: of all decode workers. `own_s`: predicted seconds of its
    prompt.
    """
    queued_s = left_s - CAUTION * own_s
    if queued_s <= 0:
        why = f"the prompt takes about {own_s:.1f} s, the deadline is in {left_s:.1f} s"
        raise BatonError(ErrorKind.DEADLINE, f"refused early: {why}")
    if ahead.requests <= slots:
        return
    excess = ahead.tokens * (1 - slots / ahead.requests) - drain.most_within(queued_s)
    if excess > 0:
        why = f"{ahead.requests} requests wait before it, more than will be placed in {left_s:.1f} s"
        wait_s = excess / drain.most_within(1.0)
        raise BatonError(
            ErrorKind.DEADLINE,
            f"refused early: {why}",
            retry_after_s=min(max(wait_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S),
        )
