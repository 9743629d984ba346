"""Workers under the supervision of this process, wherever they run."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from baton.base.errors import BatonError, ErrorKind
from services.cluster.supervision.report import ClusterStatus
from services.cluster.supervision.supervisor import Supervision
from services.common.config.cluster import ClusterConfig


class SupervisedCluster(ABC):
    """Call `open`, poll `status`, then `stop` and `close`, even after an `open` that has failed."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._supervision: Supervision | None = None
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Starts supervision. Raises BatonError where the workers cannot run."""
        self._supervision = await self._start()
        self._running = asyncio.create_task(self._supervision.run())

    def status(self) -> ClusterStatus:
        """The workers as last reported. Raises BatonError(UNAVAILABLE) once what runs them is lost."""
        assert self._supervision is not None
        assert self._running is not None
        if reason := self._lost():
            raise BatonError(ErrorKind.UNAVAILABLE, reason)
        if self._running.done():
            self._running.result()
        return self._supervision.status()

    async def stop(self, within_s: float) -> None:
        """Drains the workers, then ends them, within `within_s` seconds."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._supervision is not None:
            await self._supervision.stop(within_s)

    async def close(self) -> None:  # noqa: B027 (without Ray there is nothing)
        """Ends what was started beside the workers."""

    @abstractmethod
    async def _start(self) -> Supervision:
        """Prepares what runs the workers. Raises BatonError."""

    def _lost(self) -> str:
        """Says why no worker can run any more; empty while they can."""
        return ""
