"""The Ray actor that runs one worker's process, which ends with the actor."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import ray

from baton.base.errors import BatonError
from services.cluster.ray_calls import find_actor
from services.cluster.stderr_forwarding import use_shared_stderr
from services.cluster.supervision import UnresponsiveError
from services.cluster.worker_process import WorkerProcess
from services.common.config.cluster import ClusterConfig
from services.common.config.secrets import find_secrets, with_secrets
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import configure_logs, get_log

SUPERVISOR = "supervisor"
# Time without a call of the supervisor after which the actor checks whether it still exists.
_ABANDONED_S = 3.0
_CHECK_S = 1.0

_log = get_log("worker_actor")


class WorkerActor:
    """Runs a `WorkerProcess`. Detached, so that it outlives a restart of the supervisor; once Ray reports
    that there is no supervisor, it ends itself and the worker."""

    def __init__(self, config_json: str, name: str, namespace: str, stderr_socket: str) -> None:
        if stderr_socket:
            use_shared_stderr(stderr_socket)
        self._config = ClusterConfig.model_validate_json(config_json)
        configure_logs(self._config.log_level, exception_texts=True, process="actor", worker=name)
        self._namespace = namespace
        self._process = WorkerProcess(self._config.worker_program, self._on_process)
        self._node = ray.get_runtime_context().get_node_id()
        self._last_answer = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def report(self) -> dict[str, Any]:
        """A Report as plain values. The call also shows that the supervisor is alive."""
        self._last_answer = asyncio.get_running_loop().time()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return {**self._process.report().model_dump(mode="json"), "node": self._node}

    async def start(self, worker_json: str, number: int) -> None:
        """Starts the worker; see `WorkerProcess.start`."""
        worker = WorkerConfig.model_validate_json(worker_json)
        try:
            worker = with_secrets(self._on_this_node(worker), find_secrets(self._config, os.environ))
        except BatonError as error:
            self._process.refuse(number, BatonError(error.kind, f"{worker.name}: {error.message}"))
        else:
            self._process.start(worker, number, self._config.start_timeout_s)

    async def kill(self) -> None:
        """Kills the worker's processes."""
        self._process.kill()

    async def stop(self, within_s: float) -> None:
        """Drains and ends the worker, within `within_s` seconds."""
        await self._process.stop(within_s)

    def _on_process(self, pid: int | None) -> None:
        """Called when the worker's process has started, and with None when it has ended."""

    def _on_this_node(self, worker: WorkerConfig) -> WorkerConfig:
        """The worker with the address of this Ray node. Raises BatonError where it cannot run here."""
        if self._config.ray_address == "local":
            return worker
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return worker.model_copy(update={"host": address})

    async def _watch(self) -> None:
        """Ends this process once no supervisor exists."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_CHECK_S)
            if loop.time() - self._last_answer < _ABANDONED_S:
                continue
            with contextlib.suppress(UnresponsiveError):
                if await find_actor(SUPERVISOR, self._namespace) is None:
                    _log.warning("supervisor_lost")
                    await self._process.stop(0)
                    os._exit(0)
