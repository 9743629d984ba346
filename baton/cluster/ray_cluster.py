"""`baton up`'s side of Ray: starts or joins it, makes the supervisor, asks it how the workers stand."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.cluster.gpus import gpus_here
from baton.cluster.local_ray import LocalRay
from baton.cluster.placement import require_gpus
from baton.cluster.report import ClusterStatus
from baton.cluster.supervision import HomeSilentError
from baton.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig
from services.common.config.secrets import secrets_of, without_secrets
from services.common.observability.logs import get_log

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from baton.cluster.supervisor import SupervisorActor

_log = get_log("ray")

_JOIN_S = 60.0
_STOP_MARGIN_S = 4.0


class RayCluster:
    """The supervisor's owner: it ends with this process, however that ends. `open`, ask, `close`."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._namespace = f"baton-{config.cluster_id}"
        self._local: LocalRay | None = None
        self._supervisor: Any = None

    async def open(self) -> None:
        """Raises BatonError: UNAVAILABLE where Ray cannot be started or joined, INVALID where it has too few
        GPUs."""
        os.environ |= _environment()
        if self._config.ray_address == "local":
            actors = len(self._config.workers) + 1
            self._local = LocalRay.start(_environment(), actors, await gpus_here(self._config))
            os.environ |= self._local.environment
        began = time.monotonic()
        # While Ray starts: half a second of imports.
        await asyncio.to_thread(_import_ray)
        address = await self._local.address() if self._local else self._config.ray_address
        _log.info("ray_found", address=address, after_s=round(time.monotonic() - began, 2))
        log_door = ""
        if self._local:
            from baton.cluster.stderr_forwarding import lend_stderr

            log_door = str(self._local.folder / "stderr")
            lend_stderr(self._local.folder / "stderr")
        require_gpus(self._config, await self._join(address))
        self._supervisor = await asyncio.to_thread(self._make_supervisor, log_door)
        _log.info("ray_joined", after_s=round(time.monotonic() - began, 2))

    async def status(self) -> ClusterStatus:
        """Raises HomeSilentError while the supervisor does not answer, BatonError(UNAVAILABLE) once Ray is
        lost."""
        from baton.cluster.ray_calls import ActorGoneError, answer

        if self._local is not None and self._local.lost():
            raise BatonError(ErrorKind.UNAVAILABLE, "the local Ray has ended")
        try:
            return ClusterStatus.model_validate(await answer(self._supervisor.status.remote()))
        except ActorGoneError as error:
            raise BatonError(ErrorKind.UNAVAILABLE, f"the supervisor is lost: {error}") from error

    async def stop(self, within_s: float) -> None:
        """Has the workers drain and ends them."""
        from baton.cluster.ray_calls import ActorGoneError, answer

        if self._supervisor is not None:
            try:
                await answer(self._supervisor.stop.remote(within_s), within_s + _STOP_MARGIN_S)
            except (ActorGoneError, HomeSilentError):
                return  # with Ray gone its actors are too, and their workers with them

    async def close(self) -> None:
        """Leaves Ray, and ends it where it is ours."""
        if self._local is not None:
            await self._local.stop()  # it needs no goodbye
        elif self._supervisor is not None:
            import ray

            await asyncio.to_thread(ray.shutdown)

    async def _join(self, address: str) -> int:
        """How many GPUs there are."""
        import ray

        from baton.cluster.ray_worker_processes import hosts_of_ray

        # It has words about signals, which we set ourselves.
        logging.getLogger("ray").setLevel(logging.ERROR)
        join = partial(
            ray.init,
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

    def _make_supervisor(self, log_door: str) -> ActorHandle[SupervisorActor]:
        import ray

        from baton.cluster.supervisor import SupervisorActor
        from baton.cluster.worker_actor import SUPERVISOR

        maker: Any = ray.remote(SupervisorActor).options(
            name=SUPERVISOR,
            namespace=self._namespace,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=16,
        )
        actor: ActorHandle[SupervisorActor] = maker.remote(
            self._told().model_dump_json(), self._namespace, log_door
        )
        return actor

    def _told(self) -> ClusterConfig:
        """What actors are told: all but the secrets, and where they find those."""
        config = self._config
        secrets = secrets_of(config.workers[0])
        return config.model_copy(
            update={
                "workers": tuple(without_secrets(worker) for worker in config.workers),
                "secrets_file": self._local.keep(secrets) if self._local else config.secrets_file,
                "secret_names": tuple(secrets.given),
            }
        )


def _import_ray() -> None:
    import baton.cluster.supervisor  # noqa: F401


def _environment() -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
        # Workers see all GPUs of their host: links between two of them need that.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
