"""The Ray actor of a detached worker, which takes its name, address and secrets from its Ray node."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from baton.base.errors import BatonError, ErrorKind
from services.cluster.report import Phase
from services.cluster.worker_actor import WorkerActor
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log
from services.common.processes.run_folder import RunFolder

_CHECK_S = 1.0
_POLL_S = 0.05

_log = get_log("worker_actor")


class DetachedWorkerActor(WorkerActor):
    """A `WorkerActor` that waits for its supervisor to return, and heeds `baton stop-workers`."""

    def __init__(self, config_json: str, name: str, namespace: str, stderr_socket: str, digest: str) -> None:
        """`digest` identifies the configuration of the worker; a supervisor with another one replaces it."""
        super().__init__(config_json, name, namespace, stderr_socket)
        self._abandoned_s = self._config.abandoned_s
        self._digest = digest
        self._folder = RunFolder.of_node(os.environ)
        self._name = node_name(name)
        self._place = 0

    async def report(self) -> dict[str, Any]:
        """A Report as plain values. The call also shows that the supervisor is alive."""
        report = await super().report()
        own = {"place": self._place, "digest": self._digest, "stopping": self._node_stops()}
        return {**report, **own}

    async def start_at(self, worker_json: str, number: int, place: int) -> None:
        """Starts the worker at a place of this node; see `WorkerActor.start`."""
        self._place = place
        await self.start(worker_json, number)

    async def stop(self, within_s: float) -> None:
        """Drains and ends the worker, within `within_s` seconds."""
        deadline = asyncio.get_running_loop().time() + within_s
        # `baton stop-workers` has sent the SIGTERM already; a second one would end it at once.
        while self._node_stops() and self._runs() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        await self._process.stop(max(0.0, deadline - asyncio.get_running_loop().time()))

    def _on_this_node(self, worker: WorkerConfig) -> WorkerConfig:
        if self._node_stops():
            raise BatonError(ErrorKind.UNAVAILABLE, "its Ray node is stopping")
        worker = super()._on_this_node(worker)
        node = {
            "host": os.environ.get("BATON_HOST") or worker.host,
            "listen_host": os.environ.get("BATON_LISTEN_HOST") or None,
            "group": os.environ.get("BATON_NAME", ""),
        }
        return worker.model_copy(update={**node, "name": self._name})

    def _on_process(self, pid: int | None) -> None:
        if pid is None:
            self._folder.remove(self._name)
            return
        self._folder.record(self._name, pid)
        if self._node_stops():  # it may have been marked after this worker's start was allowed
            self._process.drain()

    def _runs(self) -> bool:
        return self._process.report().phase in (Phase.STARTING, Phase.SERVING)

    def _node_stops(self) -> bool:
        return self._folder.stopping(os.getppid())  # Ray's node process starts its actors

    async def _watch(self) -> None:
        """Ends this process once no supervisor has called for long."""
        loop = asyncio.get_running_loop()
        while loop.time() - self._last_answer < self._abandoned_s:  # noqa: ASYNC110
            await asyncio.sleep(_CHECK_S)
        _log.warning("supervisor_lost", silent_s=round(loop.time() - self._last_answer))
        await self.stop(self._config.drain_s)
        os._exit(0)


def node_name(worker: str) -> str:
    """The name by which a worker registers: unique among pods, since BATON_NAME is its pod's."""
    pod = os.environ.get("BATON_NAME")
    return f"{pod}-{worker}" if pod else worker
