"""The answers of a worker's probes: whether it should be ended, and whether it should get new work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.processes.drain import Drain
from services.worker.front.canary import Canary

if TYPE_CHECKING:
    from services.worker.front.registration import Registration

STARTING = "starting"


@dataclass(slots=True, eq=False)
class WorkerProbes:
    """Health and readiness of one worker. `registration`, `canary`: None where it has none."""

    drain: Drain
    registration: Registration | None
    canary: Canary | None
    loaded: bool = False
    # Why the engine counts as hung; empty while it makes progress.
    hung: str = ""

    @property
    def canary_failures(self) -> int | None:
        """Canary generations that have failed; None where none are run."""
        return None if self.canary is None else self.canary.failures

    def unhealthy(self) -> str | None:
        """The measure of a hung engine is the one by which the front ends it."""
        if self.hung:
            return self.hung
        return None if self.loaded else STARTING

    def unready(self) -> str | None:
        """Says why the worker should get no new work, or None. While Redis is away the lease counts as alive:
        routers keep the workers that they know."""
        if self.drain.started:
            return "the worker is draining"
        if (reason := self.unhealthy()) is not None:
            return reason
        registration = self.registration
        if registration is not None and not (registration.registered or registration.state.unavailable):
            return "the registry does not list the worker"
        return None if self.canary is None else self.canary.failure
