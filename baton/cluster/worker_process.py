"""Where one worker lives: at most one process of it at a time, started, listened to, and killed if need be.

Without Ray, and the same within a Ray actor. It reports and obeys; whether the process is started again is
the supervisor's to decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.cluster.report import Failure, Phase, Report
from baton.errors import BatonError, ErrorKind
from baton.v1.worker_pb2 import DescribeRequest, GetAuditRequest
from baton.v1.worker_pb2_grpc import WorkerServiceStub
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log
from services.common.processes.child_process import Child, ChildError
from services.common.rpc.grpc_server import channel_options
from services.common.rpc.internal_rpc import internal_channel

if TYPE_CHECKING:  # the class is in the stub file only
    from baton.v1.worker_pb2_grpc import WorkerServiceAsyncStub

PROGRAM = (sys.executable, "-m", "services.worker")
HEARTBEAT_S = 0.5
_ANSWER_S = 2.0
_MOMENT_S = 0.01

_log = get_log("worker_home")


class WorkerHome:
    """Owns the worker's process: nobody else starts, signals or reaps it."""

    def __init__(self, program: Sequence[str] = ()) -> None:
        self._program = program or PROGRAM
        self._child: Child | None = None
        self._life: asyncio.Task[None] | None = None
        self._heard = 0.0
        self._report = Report(phase=Phase.EMPTY)

    def report(self) -> Report:
        """How it stands now."""
        if self._report.phase is not Phase.SERVING:
            return self._report
        silent_s = asyncio.get_running_loop().time() - self._heard
        return self._report.model_copy(update={"silent_s": silent_s})

    def start(self, config: WorkerConfig, number: int, timeout_s: float) -> None:
        """Begins the `number`-th start of this worker; nothing where a process lives. The report tells how it
        goes on; it is killed if it does not serve within `timeout_s`."""
        if self._life is None or self._life.done():
            _log.debug("worker_starting", worker=config.name, start=number)
            counted = config.model_copy(update={"restarts": number - 1})
            index = config.engine.device_index
            self._report = Report(phase=Phase.STARTING, starts=number, device_index=index)
            self._life = asyncio.create_task(self._live(counted, timeout_s))

    def refuse(self, number: int, error: BatonError) -> None:
        """Reports the `number`-th start as failed before a process was started."""
        self._report = Report(phase=Phase.ENDED, starts=number, failure=_told(error))

    def kill(self) -> None:
        """Kills both processes of the worker, stopped ones too."""
        if self._child is not None:
            self._child.kill()

    async def stop(self, within_s: float) -> None:
        """Lets it drain, kills it after `within_s`. Returns when it is gone."""
        if self._life is None:
            return
        deadline = asyncio.get_running_loop().time() + within_s
        while self._child is None and not self._life.done():  # noqa: ASYNC110 (it is forked just now)
            await asyncio.sleep(_MOMENT_S)
        if self._child is not None:
            await self._child.stop(deadline)
        await self._life

    async def _live(self, config: WorkerConfig, timeout_s: float) -> None:
        """One process, from its start to its end."""
        failure: BatonError | ChildError | None = None
        try:
            self._child = await Child.start(config.name, self._program, config.model_dump_json())
            said = await self._child.ready(timeout_s)
            await self._serve(self._child, said["grpc"], config.cluster_secret)
            failure = await self._child.death()
        except (BatonError, ChildError) as error:
            failure = error
        except Exception as error:
            _log.exception("worker_not_watched", worker=config.name)
            failure = BatonError(ErrorKind.INTERNAL, f"{config.name}: {type(error).__name__}: {error}")
        finally:
            if self._child is not None:
                self._child.kill()
                await self._child.ended()
                self._child = None
            self._learn(phase=Phase.ENDED, failure=_told(failure))

    async def _serve(self, child: Child, address: str, cluster_secret: str) -> None:
        """Listens to its heart until the process ends."""
        ended = asyncio.create_task(child.ended())
        async with internal_channel(address, channel_options(), cluster_secret) as channel:
            worker: WorkerServiceAsyncStub = WorkerServiceStub(channel)
            beating = asyncio.create_task(self._beat(worker, address))
            try:
                await asyncio.wait({ended, beating}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    beating.result()
            finally:
                beating.cancel()
                ended.cancel()
                await asyncio.gather(beating, ended, return_exceptions=True)

    async def _beat(self, worker: WorkerServiceAsyncStub, address: str) -> None:
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        self._learn(phase=Phase.SERVING, address=address)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if self._report.incarnation:
                    await worker.Describe(DescribeRequest(), timeout=_ANSWER_S)
                else:
                    await self._meet(worker)
                self._heard = loop.time()
            await asyncio.sleep(HEARTBEAT_S)

    async def _meet(self, worker: WorkerServiceAsyncStub) -> None:
        """Learns who it is, once."""
        audit = (await worker.GetAudit(GetAuditRequest(), timeout=_ANSWER_S)).audit
        described = await worker.Describe(DescribeRequest(), timeout=_ANSWER_S)
        self._learn(
            front_pid=audit.front_pid,
            engine_pid=audit.engine_pid,
            incarnation=described.identity.incarnation.hex(),
        )

    def _learn(self, **news: object) -> None:
        self._report = self._report.model_copy(update=news)


def _told(error: BatonError | ChildError | None) -> Failure | None:
    if isinstance(error, BatonError):
        return Failure(kind=error.kind.name, message=error.message)
    if error is None:
        return None
    kind = ErrorKind.CONFLICT if error.replaced else ErrorKind.UNAVAILABLE
    return Failure(kind=kind.name, message=str(error))
