"""Which transport a receiver's next link begins with, after a better one broke or could not be had.

    best ──broken, out of reach──▶ next ──after a pause──▶ best is tried beside it ──opened──▶ best
                                     ▲                          └── failed: the pause doubles
                                     └──────────────────────────────┘

Pauses begin at `FIRST_PAUSE_S`, double with each failure and with each break soon after a return, and never
exceed `LONGEST_PAUSE_S`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

# Receivers remembered.
_MOST = 1024

LinkKey = tuple[str, bytes]
"""(address, incarnation) of a receiver."""


@dataclass(slots=True)
class _Fallback:
    # How many of the receiver's ways are passed over, the best first; and why.
    passed_over: int
    reason: str
    pause_s: float
    retry_at: float


class Fallbacks:
    """Of one sender. Times are of its clock, in seconds."""

    def __init__(self) -> None:
        self._fallbacks: OrderedDict[LinkKey, _Fallback] = OrderedDict()

    def passed_over(self, key: LinkKey, now: float) -> int:
        """How many of the ways a new link to this receiver leaves out; none once a retry is due."""
        found = self._fallbacks.get(key)
        return 0 if found is None or now >= found.retry_at else found.passed_over

    def reason(self, key: LinkKey) -> str:
        """Why a better way was left, last."""
        found = self._fallbacks.get(key)
        return found.reason if found is not None else ""

    def fall(self, key: LinkKey, passed_over: int, reason: str, now: float) -> None:
        """The way before these broke, or could not be had."""
        before = self._fallbacks.pop(key, None)
        pause_s = FIRST_PAUSE_S
        if before is not None and now < before.retry_at + LONGEST_PAUSE_S:
            pause_s = min(2 * before.pause_s, LONGEST_PAUSE_S)
        self._fallbacks[key] = _Fallback(passed_over, reason, pause_s, now + pause_s)
        if len(self._fallbacks) > _MOST:
            self._fallbacks.popitem(last=False)

    def due(self, key: LinkKey, now: float) -> bool:
        """Whether a better way than the link's own is to be tried now."""
        found = self._fallbacks.get(key)
        return found is not None and found.passed_over > 0 and now >= found.retry_at

    def returned(self, key: LinkKey, now: float) -> None:
        """The best way is in use again."""
        if (found := self._fallbacks.get(key)) is not None:
            found.passed_over, found.retry_at = 0, now
