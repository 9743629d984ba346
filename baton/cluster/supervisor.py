"""The supervisor as a named Ray actor. Ray starts it again when it dies; it finds the workers by name."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.cluster.ray_worker_processes import RayHomes
from baton.cluster.stderr_forwarding import borrow_stderr
from baton.cluster.supervision import Supervision
from services.common.config.cluster import ClusterConfig
from services.common.observability.logs import configure_logs, get_log

_log = get_log("supervisor")


class SupervisorActor:
    """Runs `Supervision` over Ray homes. Not detached: it ends with `baton up`, and the workers see that."""

    def __init__(self, config_json: str, namespace: str, log_door: str) -> None:
        if log_door:
            borrow_stderr(log_door)
        config = ClusterConfig.model_validate_json(config_json)
        configure_logs(config.log_level, process="supervisor")
        self._supervision = Supervision(config, RayHomes(config, namespace, log_door))
        self._running: asyncio.Task[None] | None = None

    async def status(self) -> dict[str, Any]:
        """A ClusterStatus as plain values; the first question sets the supervisor to work."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        if self._running.done():
            self._running.result()
        return self._supervision.status().model_dump(mode="json")

    async def stop(self, within_s: float) -> None:
        """Ends all workers."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._supervision.stop(within_s)

    async def _run(self) -> None:
        try:
            await self._supervision.run()
        except Exception:
            _log.exception("supervisor_failed")
            raise
