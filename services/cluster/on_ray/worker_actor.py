"""The Ray actor that runs one worker's process, which ends with the actor.

It takes the worker's name, address and secrets from its Ray node, unless `baton up` has started that Ray.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray

from baton.base.errors import BatonError, ErrorKind
from services.cluster.on_ray.stderr_forwarding import use_shared_stderr
from services.cluster.supervision.report import Phase
from services.cluster.supervision.worker_process import WorkerProcess
from services.common.config.cluster import ClusterConfig
from services.common.config.settings_tree.secrets import find_secrets, with_secrets
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import configure_logs, get_log
from services.common.processes.run_folder import RunFolder

_CHECK_S = 1.0
_POLL_S = 0.05

_log = get_log("worker_actor")


class WorkerActor:
    """Runs a `WorkerProcess`, and ends it when `baton ray stop-workers` asks for that.

    Ray ends the actor with the process of its supervisor. A detached one stays, and waits for a supervisor to
    return; after `abandoned_s` it drains its worker and ends.
    """

    def __init__(self, config_json: str, name: str, digest: str, stderr_socket: str) -> None:
        """`digest` identifies the configuration of the worker; a supervisor with another one replaces it."""
        if stderr_socket:
            use_shared_stderr(stderr_socket)
        self._config = ClusterConfig.model_validate_json(config_json)
        configure_logs(self._config.log_level, exception_texts=True, process="actor", worker=name)
        self._name = name if self._config.ray_address == "local" else node_name(name)
        self._digest = digest
        self._folder = RunFolder.of_node(os.environ)
        self._process = WorkerProcess(self._config.worker_program, self._on_process)
        self._node = ray.get_runtime_context().get_node_id()
        self._place = 0
        self._last_answer = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def report(self) -> dict[str, Any]:
        """A Report as plain values. The call also shows that the supervisor is alive."""
        self._last_answer = asyncio.get_running_loop().time()
        if self._watching is None and self._config.detached:
            self._watching = asyncio.create_task(self._watch())
        own = {"node": self._node, "place": self._place, "digest": self._digest}
        return {**self._process.report().model_dump(mode="json"), **own, "stopping": self._node_stops()}

    async def start(self, worker_json: str, number: int, place: int) -> None:
        """Starts the worker at a place of this node; see `WorkerProcess.start`."""
        self._place = place
        worker = WorkerConfig.model_validate_json(worker_json)
        try:
            worker = with_secrets(self._on_this_node(worker), find_secrets(self._config, os.environ))
        except BatonError as error:
            self._process.refuse(number, BatonError(error.kind, f"{worker.name}: {error.message}"))
        else:
            self._process.start(worker, number, self._config.start_timeout_s)

    async def kill(self) -> None:
        """Kills the worker's processes without draining."""
        self._process.kill()

    async def stop(self, within_s: float) -> None:
        """Drains and ends the worker, within `within_s` seconds."""
        deadline = asyncio.get_running_loop().time() + within_s
        # `baton ray stop-workers` has sent the SIGTERM already; a second one would end it at once.
        while self._node_stops() and self._runs() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        await self._process.stop(max(0.0, deadline - asyncio.get_running_loop().time()))

    def _on_this_node(self, worker: WorkerConfig) -> WorkerConfig:
        """The worker with the address of this Ray node. Raises BatonError where it cannot run here."""
        if self._node_stops():
            raise BatonError(ErrorKind.UNAVAILABLE, "its Ray node is stopping")
        if self._config.ray_address == "local":
            return worker
        node = {
            "host": os.environ.get("BATON_HOST") or ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "listen_host": os.environ.get("BATON_LISTEN_HOST") or None,
            "group": os.environ.get("BATON_NAME", ""),
        }
        return worker.model_copy(update={**node, "name": self._name})

    def _on_process(self, pid: int | None) -> None:
        """Called when the worker's process has started, and with None when it has ended."""
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
        while loop.time() - self._last_answer < self._config.abandoned_s:  # noqa: ASYNC110
            await asyncio.sleep(_CHECK_S)
        _log.warning("supervisor_lost", silent_s=round(loop.time() - self._last_answer))
        await self.stop(self._config.drain_s)
        os._exit(0)


def node_name(worker: str) -> str:
    """The name by which a worker registers: unique among pods, since BATON_NAME is its pod's."""
    pod = os.environ.get("BATON_NAME")
    return f"{pod}-{worker}" if pod else worker
