"""The supervisor as a named Ray actor. Ray restarts it when it dies; it finds the worker actors by name."""

from __future__ import annotations

import asyncio
from typing import Any

from services.cluster.ray_worker_processes import RayWorkerProcesses
from services.cluster.stderr_forwarding import use_shared_stderr
from services.cluster.supervision import Supervision
from services.common.config.cluster import ClusterConfig
from services.common.observability.logs import configure_logs, get_log

_log = get_log("supervisor")


class SupervisorActor:
    """Runs `Supervision` over worker actors. Not detached: it ends with `baton up`, which the worker
    actors detect."""

    def __init__(self, config_json: str, namespace: str, stderr_socket: str) -> None:
        if stderr_socket:
            use_shared_stderr(stderr_socket)
        config = ClusterConfig.model_validate_json(config_json)
        configure_logs(config.log_level, exception_texts=True, process="supervisor")
        self._supervision = Supervision(config, RayWorkerProcesses(config, namespace, stderr_socket))
        self._running: asyncio.Task[None] | None = None

    async def status(self) -> dict[str, Any]:
        """A ClusterStatus as plain values; the first call starts supervision."""
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
