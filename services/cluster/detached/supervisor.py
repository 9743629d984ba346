"""Supervises detached workers: joins Ray, adopts the workers of an earlier supervisor, then runs the loop.

joining → starting → supervising → draining → ended
   │                     └ its Ray node has ended: raise, the workers run on where Ray does
   └ no Ray at the address within the start timeout: raise
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from baton.base.errors import BatonError, ErrorKind
from services.cluster.detached.ray_node import RayNode
from services.cluster.detached.worker_processes import DetachedWorkerProcesses
from services.cluster.ray_calls import in_thread, join_ray
from services.cluster.report import ClusterStatus
from services.cluster.supervision import Supervision, UnresponsiveError
from services.common.config.cluster import ClusterConfig
from services.common.observability.logs import get_log

_JOIN_S = 60.0
_RETRY_S = 2.0
_LOST_POLL_S = 0.5

_log = get_log("supervisor")


class DetachedSupervisor:
    """Call `run`, which returns only by an exception; then `drain` or not, and always `close`."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._host = config.host
        self._node: RayNode | None = None
        self._supervision: Supervision | None = None

    def status(self) -> ClusterStatus:
        """The workers as last reported; none of them before Ray was joined."""
        if self._supervision is None:
            return ClusterStatus(complete=False, reports={})
        return self._supervision.status()

    async def run(self, on_joined: Callable[[], None]) -> None:
        """Joins Ray, calls `on_joined`, and supervises. Raises BatonError(UNAVAILABLE) where Ray cannot be
        joined or is lost."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                processes = await self._open(on_joined)
        except TimeoutError:
            message = f"no Ray at {self._config.ray_address} within {self._config.start_timeout_s:g} s"
            raise BatonError(ErrorKind.UNAVAILABLE, message) from None
        self._supervision = Supervision(self._config, processes)
        running = asyncio.create_task(self._supervision.run())
        try:
            while not running.done():
                if self._node is not None and self._node.lost():
                    raise BatonError(ErrorKind.UNAVAILABLE, "its Ray node has ended")
                await asyncio.wait({running}, timeout=_LOST_POLL_S)
            running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def drain(self) -> None:
        """Drains and ends all workers; `run` must have ended."""
        if self._supervision is not None:
            try:
                await self._supervision.stop(self._config.drain_s)
            except UnresponsiveError as error:
                _log.warning("drain_unanswered", reason=str(error))

    async def close(self) -> None:
        """Leaves Ray. Workers run on."""
        # Without `ray.shutdown`, which waits for a head that may be away.
        if self._node is not None:
            await self._node.stop()

    @property
    def _namespace(self) -> str:
        return f"baton-{self._config.cluster_id}"

    async def _open(self, on_joined: Callable[[], None]) -> DetachedWorkerProcesses:
        await self._join()
        on_joined()
        processes = DetachedWorkerProcesses(self._config, self._namespace)
        while True:
            try:
                await processes.replace_outdated()
            except UnresponsiveError as error:
                _log.warning("ray_unanswered", reason=str(error))
                await asyncio.sleep(_RETRY_S)
            else:
                return processes

    async def _join(self) -> None:
        address = self._config.ray_address
        while self._node is None:
            try:
                self._node = await RayNode.join(address, self._host)
            except BatonError as error:  # its head may not run yet
                _log.warning("ray_not_joined", address=address, reason=error.message)
                await asyncio.sleep(_RETRY_S)
        # It warns about signal handlers, which `StopSignal` installs.
        logging.getLogger("ray").setLevel(logging.ERROR)
        join = partial(
            join_ray,
            address=address,
            namespace=self._namespace,
            _node_ip_address=self._host,
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        try:
            await in_thread(join, _JOIN_S)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BatonError(ErrorKind.UNAVAILABLE, f"cannot join Ray at {address}: {reason}") from error
        _log.info("ray_joined", address=address)
