"""Runs the workers on Ray, one that this process starts or one that it joins, under the supervision of this
process.

joining → supervising → stopped
   │           └ Ray, or the node of this process, has ended: `status` raises; detached workers run on where
   │             Ray does
   └ no Ray at the address in time: `open` raises
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from baton.base.errors import BatonError, ErrorKind
from services.cluster.gpus.available_gpus import available_gpus
from services.cluster.gpus.gpu_sharing import require_gpus
from services.cluster.on_ray.ray_node import RayNode
from services.cluster.on_ray.rooms import declared
from services.cluster.supervision.supervised import SupervisedCluster
from services.cluster.supervision.supervisor import Supervision, UnresponsiveError
from services.common.config.cluster import ClusterConfig
from services.common.config.settings_tree.secrets import secrets_of, without_secrets
from services.common.observability.logs import get_log

_log = get_log("ray")

_JOIN_S = 60.0
_RETRY_S = 2.0


class RayCluster(SupervisedCluster):
    """Workers in Ray actors, which end with this process unless they are detached."""

    def __init__(self, config: ClusterConfig, on_joined: Callable[[], None]) -> None:
        """`on_joined` is called once Ray is joined, which replaces the handler of SIGTERM."""
        super().__init__(config)
        self._on_joined = on_joined
        self._namespace = f"baton-{config.cluster_id}"
        self._node: RayNode | None = None

    async def stop(self, within_s: float) -> None:
        try:
            await super().stop(within_s)
        except UnresponsiveError as error:
            _log.warning("drain_unanswered", reason=str(error))

    async def close(self) -> None:
        """Leaves Ray, and ends the node that this process has started; detached workers run on."""
        # Without `ray.shutdown`, which waits for a head that may be away.
        if self._node is not None:
            await self._node.stop()

    async def _start(self) -> Supervision:
        """Starts or joins Ray. Raises BatonError: UNAVAILABLE where that fails, INVALID where it has too few
        GPUs."""
        asyncio.get_running_loop().set_default_executor(_Threads())
        began = time.monotonic()
        address = await self._address()
        await self._join(address)
        self._on_joined()
        _log.info("ray_joined", address=address, after_s=round(time.monotonic() - began, 2))
        return await (self._detached() if self._config.detached else self._own())

    def _lost(self) -> str:
        if self._node is None or not self._node.lost():
            return ""
        return "the local Ray has ended" if self._config.ray_address == "local" else "its Ray node has ended"

    async def _address(self) -> str:
        """The address of Ray, once it may be joined from this machine."""
        config = self._config
        if config.detached:
            await self._beside()
            return config.ray_address or ""
        os.environ |= _environment()
        if config.ray_address != "local":
            return config.ray_address or ""
        room = declared(Counter(worker.role for worker in config.workers))
        gpus = await available_gpus(config)
        self._node = RayNode.head(_environment(), len(config.workers), gpus, room)
        os.environ |= self._node.environment
        await asyncio.to_thread(_import_ray)  # takes half a second, while Ray starts
        return await self._node.address()

    async def _beside(self) -> None:
        """Starts a node on this machine, once a Ray can be joined; its head may not run yet."""
        address, within_s = self._config.ray_address or "", self._config.start_timeout_s
        try:
            async with asyncio.timeout(within_s):
                while self._node is None:
                    try:
                        self._node = await RayNode.beside(address, self._config.host)
                    except BatonError as error:
                        _log.warning("ray_not_joined", address=address, reason=error.message)
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise BatonError(ErrorKind.UNAVAILABLE, f"no Ray at {address} within {within_s:g} s") from None

    async def _join(self, address: str) -> None:
        from services.cluster.on_ray.ray_calls import in_thread, join_ray

        # It warns about signal handlers, which `StopSignal` installs.
        logging.getLogger("ray").setLevel(logging.ERROR)
        here = {"_node_ip_address": self._config.host} if self._config.detached else {}
        join = partial(
            join_ray,
            address=address,
            namespace=self._namespace,
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            **here,
        )
        try:
            await in_thread(join, _JOIN_S)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BatonError(ErrorKind.UNAVAILABLE, f"cannot join Ray at {address}: {reason}") from error

    async def _own(self) -> Supervision:
        """Workers that end with this process."""
        from services.cluster.on_ray.ray_calls import in_thread
        from services.cluster.on_ray.ray_worker_processes import RayWorkerProcesses, nodes_of_ray

        gpus = sum(node.gpus for node in await in_thread(nodes_of_ray, _JOIN_S))
        require_gpus(self._config, gpus)
        stderr_socket = ""
        if self._node is not None:
            from services.cluster.on_ray.stderr_forwarding import share_stderr

            share_stderr(self._node.folder / "stderr")
            stderr_socket = str(self._node.folder / "stderr")
        config = self._config_for_actors()
        processes = RayWorkerProcesses(config, self._namespace, gpus=gpus, stderr_socket=stderr_socket)
        return Supervision(config, processes)

    async def _detached(self) -> Supervision:
        """Workers that outlive this process: those of an earlier one are adopted or replaced."""
        from services.cluster.on_ray.ray_worker_processes import RayWorkerProcesses

        processes = RayWorkerProcesses(self._config, self._namespace)
        deadline = time.monotonic() + self._config.start_timeout_s
        while True:
            try:
                await processes.replace_outdated()
            except UnresponsiveError as error:
                if time.monotonic() > deadline:
                    raise BatonError(ErrorKind.UNAVAILABLE, f"Ray does not answer: {error}") from error
                _log.warning("ray_unanswered", reason=str(error))
                await asyncio.sleep(_RETRY_S)
            else:
                return Supervision(self._config, processes)

    def _config_for_actors(self) -> ClusterConfig:
        """The configuration without the secrets, but with the file that holds them: Ray keeps the arguments
        of actors."""
        config = self._config
        secrets = secrets_of(config.workers[0])
        file = self._node.write_secrets(secrets) if self._node is not None else config.secrets_file
        return config.model_copy(
            update={
                "workers": tuple(without_secrets(worker) for worker in config.workers),
                "secrets_file": file,
                "secret_names": tuple(secrets),
            }
        )


class _Threads(ThreadPoolExecutor):
    """Threads of calls to Ray, which block for minutes while its head is away: the process does not wait for
    them when it ends."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def _import_ray() -> None:
    import services.cluster.on_ray.ray_worker_processes  # noqa: F401


def _environment() -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
        # Workers see all GPUs of their host, as links between GPUs require.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
