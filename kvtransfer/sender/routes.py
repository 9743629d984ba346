"""Chooses the transport of a link to a receiver: the routes there are, and when to fall back or return.

    best ──broken, unreachable──▶ next ──after a pause──▶ best is tried in parallel ──opened──▶ best
                                    ▲                          └── failed: the pause doubles
                                    └──────────────────────────────┘

Pauses start at `MIN_PAUSE_S`, double with each failure and with each break soon after a return, and never
exceed `MAX_PAUSE_S`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.base.errors import BatonError, ErrorKind, FailureCause
from kvtransfer.link.interfaces import Connector
from kvtransfer.protocol.addresses import Endpoint, to_text

MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0

# Receivers whose fallbacks are kept.
_MAX_RECEIVERS = 1024


class LinkKey(NamedTuple):
    """One incarnation of a receiver."""

    endpoints: tuple[Endpoint, ...]
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class Route:
    """One way to a receiver: an endpoint, and the connector that reaches it."""

    connector: Connector
    endpoint: Endpoint

    @property
    def transport(self) -> str:
        return self.connector.transport


def routes(endpoints: Sequence[Endpoint], connectors: Sequence[Connector]) -> tuple[Route, ...]:
    """All routes, in the receiver's order of preference. BatonError(CONFLICT) where there is none."""
    found = tuple(
        Route(connector, endpoint)
        for endpoint in endpoints
        for connector in connectors
        if connector.reaches(endpoint)
    )
    if not found:
        known = ", ".join(connector.transport for connector in connectors)
        raise BatonError(
            ErrorKind.CONFLICT,
            f"the receiver at {to_text(endpoints)!r} cannot be reached over {known}",
            cause=FailureCause.LINK,
        )
    return found


@dataclass(slots=True)
class _Fallback:
    # How many of the receiver's routes are skipped, the best first; and why.
    skipped: int
    reason: str
    pause_s: float
    retry_at: float


class Fallbacks:
    """The current fallbacks of one sender. Times are of its clock, in seconds."""

    def __init__(self) -> None:
        self._fallbacks: OrderedDict[LinkKey, _Fallback] = OrderedDict()

    def skipped(self, key: LinkKey, now: float) -> int:
        """Number of routes that a new link to this receiver skips; 0 once a retry is due."""
        found = self._fallbacks.get(key)
        return 0 if found is None or now >= found.retry_at else found.skipped

    def reason(self, key: LinkKey) -> str:
        """Says why a better route was given up last, or ""."""
        found = self._fallbacks.get(key)
        return found.reason if found is not None else ""

    def fall_back(self, key: LinkKey, skipped: int, reason: str, now: float) -> None:
        """Records that the last of the skipped routes broke, or could not be opened."""
        before = self._fallbacks.pop(key, None)
        pause_s = MIN_PAUSE_S
        if before is not None and now < before.retry_at + MAX_PAUSE_S:
            pause_s = min(2 * before.pause_s, MAX_PAUSE_S)
        self._fallbacks[key] = _Fallback(skipped, reason, pause_s, now + pause_s)
        if len(self._fallbacks) > _MAX_RECEIVERS:
            self._fallbacks.popitem(last=False)

    def due(self, key: LinkKey, now: float) -> bool:
        """True if a better route than the one in use is to be tried now."""
        found = self._fallbacks.get(key)
        return found is not None and found.skipped > 0 and now >= found.retry_at

    def returned(self, key: LinkKey, now: float) -> None:
        """Records that the best route is in use again."""
        if (found := self._fallbacks.get(key)) is not None:
            found.skipped, found.retry_at = 0, now
