"""The Ray actor of one worker: a home whose process dies with it, on whatever host Ray runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import ray

from baton.cluster.ray_calls import find
from baton.cluster.stderr_forwarding import borrow_stderr
from baton.cluster.supervision import HomeSilentError
from baton.cluster.worker_process import WorkerHome
from baton.errors import BatonError
from services.common.config.cluster import ClusterConfig
from services.common.config.secrets import find_secrets, with_secrets
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import configure_logs, get_log

SUPERVISOR = "supervisor"
# Silence of the supervisor after which its worker looks whether there is one any more.
_ALONE_S = 3.0
_LOOK_S = 1.0

_log = get_log("worker_actor")


class WorkerActor:
    """Owns a home. It is detached, to outlive a supervisor that comes back; once there is none any more,
    which Ray says for sure, it ends, and the worker with it."""

    def __init__(self, config_json: str, name: str, namespace: str, log_door: str) -> None:
        if log_door:
            borrow_stderr(log_door)
        self._config = ClusterConfig.model_validate_json(config_json)
        configure_logs(self._config.log_level, process="actor", worker=name)
        self._namespace = namespace
        self._home = WorkerHome(self._config.worker_program)
        self._node = ray.get_runtime_context().get_node_id()
        self._heard = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def report(self) -> dict[str, Any]:
        """A Report as plain values. It is how the supervisor shows that it lives."""
        self._heard = asyncio.get_running_loop().time()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return {**self._home.report().model_dump(mode="json"), "node": self._node}

    async def start(self, worker_json: str, number: int) -> None:
        """Begins a start of the worker; see `WorkerHome.start`."""
        worker = WorkerConfig.model_validate_json(worker_json)
        if self._config.ray_address != "local":
            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            worker = worker.model_copy(update={"host": address})
        try:
            worker = with_secrets(worker, find_secrets(self._config, os.environ))
        except BatonError as error:
            self._home.refuse(number, BatonError(error.kind, f"{worker.name}: {error.message}"))
        else:
            self._home.start(worker, number, self._config.start_timeout_s)

    async def kill(self) -> None:
        """Kills the worker's processes."""
        self._home.kill()

    async def stop(self, within_s: float) -> None:
        """Lets the worker drain."""
        await self._home.stop(within_s)

    async def _watch(self) -> None:
        """Ends this process when nobody will ever ask for its worker again."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            if loop.time() - self._heard < _ALONE_S:
                continue
            with contextlib.suppress(HomeSilentError):
                if await find(SUPERVISOR, self._namespace) is None:
                    _log.warning("no_supervisor_any_more")
                    await self._home.stop(0)
                    os._exit(0)
