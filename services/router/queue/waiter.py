"""The wait of a request in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.router.placement.claim import PrefillClaim
from services.router.placement.placement import NoRoom
from services.router.request.limits import Needs

ClaimT = TypeVar("ClaimT", bound="PrefillClaim")


@dataclass(eq=False)
class Waiter(Generic[ClaimT]):
    """A request that waits, as the queue knows it. `needs`: what it asks of workers. `limited`: whether its
    own limits may be why nothing has room. `since`: when it began to wait, on the event loop's clock.
    `unfit`: the version of the pools at which it was beyond the limits of all workers."""

    pick: Callable[[], ClaimT | NoRoom]
    claim: asyncio.Future[ClaimT]
    needs: Needs
    limited: bool
    since: float
    unfit: int | None = None
