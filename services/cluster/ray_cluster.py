"""Runs the workers on Ray: starts or joins it, creates the supervisor actor, and polls its status."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.base.errors import BatonError, ErrorKind
from services.cluster.gpus import available_gpus
from services.cluster.local_ray import LocalRay
from services.cluster.placement import require_gpus
from services.cluster.report import ClusterStatus
from services.cluster.supervision import UnresponsiveError
from services.common.config.cluster import ClusterConfig
from services.common.config.secrets import secrets_of, without_secrets
from services.common.observability.logs import get_log

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from services.cluster.supervisor import SupervisorActor

_log = get_log("ray")

_JOIN_S = 60.0
_STOP_MARGIN_S = 4.0


class RayCluster:
    """Owns the supervisor actor, which ends with this process. Call `open`, poll `status`, then `stop`
    and `close`."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._namespace = f"baton-{config.cluster_id}"
        self._local: LocalRay | None = None
        self._supervisor: Any = None

    async def open(self) -> None:
        """Starts or joins Ray and creates the supervisor. Raises BatonError: UNAVAILABLE where Ray cannot be
        started or joined, INVALID where it has too few GPUs."""
        os.environ |= _environment()
        if self._config.ray_address == "local":
            actors = len(self._config.workers) + 1
            self._local = LocalRay.start(_environment(), actors, await available_gpus(self._config))
            os.environ |= self._local.environment
        began = time.monotonic()
        # Importing Ray takes half a second, while Ray starts.
        await asyncio.to_thread(_import_ray)
        address = await self._local.address() if self._local else self._config.ray_address
        _log.info("ray_found", address=address, after_s=round(time.monotonic() - began, 2))
        stderr_socket = ""
        if self._local:
            from services.cluster.stderr_forwarding import share_stderr

            stderr_socket = str(self._local.folder / "stderr")
            share_stderr(self._local.folder / "stderr")
        require_gpus(self._config, await self._join(address))
        self._supervisor = await asyncio.to_thread(self._make_supervisor, stderr_socket)
        _log.info("ray_joined", after_s=round(time.monotonic() - began, 2))

    async def status(self) -> ClusterStatus:
        """The workers' status. Raises UnresponsiveError while the supervisor does not answer,
        BatonError(UNAVAILABLE) once Ray or the supervisor is lost."""
        from services.cluster.ray_calls import ActorGoneError, call_actor

        if self._local is not None and self._local.lost():
            raise BatonError(ErrorKind.UNAVAILABLE, "the local Ray has ended")
        try:
            return ClusterStatus.model_validate(await call_actor(self._supervisor.status.remote()))
        except ActorGoneError as error:
            raise BatonError(ErrorKind.UNAVAILABLE, f"the supervisor is lost: {error}") from error

    async def stop(self, within_s: float) -> None:
        """Drains the workers, then ends them, within `within_s` seconds."""
        from services.cluster.ray_calls import ActorGoneError, call_actor

        if self._supervisor is not None:
            try:
                await call_actor(self._supervisor.stop.remote(within_s), within_s + _STOP_MARGIN_S)
            except (ActorGoneError, UnresponsiveError):
                return  # without Ray its actors and their workers have ended too

    async def close(self) -> None:
        """Disconnects from Ray; ends it where this cluster started it."""
        if self._local is not None:
            await self._local.stop()  # disconnecting first is unnecessary
        elif self._supervisor is not None:
            import ray

            await asyncio.to_thread(ray.shutdown)

    async def _join(self, address: str) -> int:
        """Joins the Ray at `address`; returns the number of its GPUs."""
        from services.cluster.ray_calls import join_ray
        from services.cluster.ray_worker_processes import hosts_of_ray

        # It warns about signal handlers, which `StopSignal` installs.
        logging.getLogger("ray").setLevel(logging.ERROR)
        join = partial(
            join_ray,
            address=address,
            namespace=self._namespace,
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        try:
            async with asyncio.timeout(_JOIN_S):
                await asyncio.to_thread(join)
                return sum(host.gpus for host in await asyncio.to_thread(hosts_of_ray))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BatonError(ErrorKind.UNAVAILABLE, f"cannot join Ray at {address}: {reason}") from error

    def _make_supervisor(self, stderr_socket: str) -> ActorHandle[SupervisorActor]:
        import ray

        from services.cluster.supervisor import SupervisorActor
        from services.cluster.worker_actor import SUPERVISOR

        maker: Any = ray.remote(SupervisorActor).options(
            name=SUPERVISOR,
            namespace=self._namespace,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=16,
        )
        actor: ActorHandle[SupervisorActor] = maker.remote(
            self._config_for_actors().model_dump_json(), self._namespace, stderr_socket
        )
        return actor

    def _config_for_actors(self) -> ClusterConfig:
        """The configuration for actors: without the secrets, but with the file that holds them."""
        config = self._config
        secrets = secrets_of(config.workers[0])
        return config.model_copy(
            update={
                "workers": tuple(without_secrets(worker) for worker in config.workers),
                "secrets_file": self._local.write_secrets(secrets) if self._local else config.secrets_file,
                "secret_names": tuple(secrets),
            }
        )


def _import_ray() -> None:
    import services.cluster.supervisor  # noqa: F401


def _environment() -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
        # Workers see all GPUs of their host, as links between GPUs require.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
