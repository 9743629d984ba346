"""What the lifecycles of all requests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.state import Journal
    from services.router.lifecycle.observations import Observations
    from services.router.lifecycle.outbox import UnreadBudget
    from services.router.request.request import Request
    from services.router.text.output_text import OutputText
    from services.router.workers.cancels import Cancels
    from services.router.workers.prefix_affinity import PrefixAffinity
    from services.router.workers.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class LifecycleDeps:
    """`max_attempts`: failed attempts after which a request fails. `output_text`: makes the text side of a
    request's output. `journal`: None without a state store."""

    queue: WaitingQueue
    cancels: Cancels
    max_attempts: int
    observations: Observations
    prefixes: PrefixAffinity
    unread: UnreadBudget
    output_text: Callable[[Request], OutputText]
    journal: Journal | None = None
