"""Lets requests pass others in the queue that wait for a prefill worker alone.

Those with shorter prompts may, since workers compute them first: so a short prompt does not wait in the queue
for what it would not wait for at a worker. Bounded twice: only the first few behind the first that waits are
looked at, and one that has waited for as long as workers pass over a prompt is passed by none.
"""

from __future__ import annotations

import math

from baton.base.prefill_defaults import AGE_CAP_S
from services.router.placement.placement import Placement
from services.router.queue.request_order import RequestOrder

# Requests looked at.
_MOST_LOOKED_AT = 64


def may_pass(placement: Placement, order: RequestOrder) -> bool:
    """True if short prompts go before long ones in the queue as at workers: where late requests are refused,
    so that none is let in which makes others late, and all that wait are of one tenant and priority, and need
    one pool. Elsewhere a sender of many short prompts would fill the workers."""
    return placement.refuse_late and order.flows <= 1 and not placement.pools.several


class Passing:
    """Findings of one scan of the queue."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._shortest = math.inf
        self._looked_at = 0
        self.over = False

    def may_try(self, prompt: int) -> bool:
        """True if a request with a prompt of `prompt` tokens may be placed before those that wait."""
        if self._shortest < math.inf:
            self._looked_at += 1
            self.over = self._looked_at >= _MOST_LOOKED_AT
        return prompt < self._shortest

    def waits(self, prompt: int, since: float) -> None:
        """Records that a request with such a prompt waits for a prefill worker."""
        self._shortest = prompt
        self.over = self.over or self._now - since > AGE_CAP_S
