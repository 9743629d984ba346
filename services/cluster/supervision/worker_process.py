"""Owns the process of one worker: starts it, checks that it answers, kills it.

Used directly without Ray, and within a Ray actor. The supervisor decides about restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.base.process_watch import ProcessWatch
from baton.base.python_module import python_module
from baton.v1.worker_pb2 import DescribeRequest, GetAuditRequest
from baton.v1.worker_pb2_grpc import WorkerServiceStub
from services.cluster.supervision.report import Failure, Phase, Report
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log
from services.common.processes.child_process import Child, ChildError
from services.common.rpc.grpc_server import channel_options
from services.common.rpc.internal_rpc import internal_channel

if TYPE_CHECKING:  # the class is in the stub file only
    from baton.v1.worker_pb2_grpc import WorkerServiceAsyncStub

PROGRAM = python_module("services.worker")
HEARTBEAT_S = 0.5
_ANSWER_S = 2.0
_FORK_POLL_S = 0.01

_log = get_log("worker_process")


class WorkerProcess:
    """The process of a worker, at most one at a time; only this class starts, signals and reaps it."""

    def __init__(
        self, program: Sequence[str] = (), on_process: Callable[[int | None], None] = lambda pid: None
    ) -> None:
        """`on_process` is called with each process's id once it has started, and with None once it has
        ended."""
        self._program = program or PROGRAM
        self._on_process = on_process
        self._child: Child | None = None
        self._run_task: asyncio.Task[None] | None = None
        # Of the front, from the first heartbeat on.
        self._watch: ProcessWatch | None = None
        self._exchange_timeouts = 0
        self._report = Report(phase=Phase.EMPTY)

    def report(self) -> Report:
        """Returns the worker's current state."""
        watch = self._watch
        if self._report.phase is not Phase.SERVING or watch is None:
            return self._report
        watch.look()
        return self._report.model_copy(update={"silent_s": watch.silent_s, "ran_s": watch.ran_s})

    def start(self, config: WorkerConfig, number: int, timeout_s: float) -> None:
        """Begins the `number`-th start of this worker; does nothing while a process runs. Progress is in
        `report`. The process is killed if it does not serve within `timeout_s` seconds."""
        if self._run_task is None or self._run_task.done():
            _log.debug("worker_starting", worker=config.name, start=number)
            counts = {"restarts": number - 1, "exchange_timeouts": self._exchange_timeouts}
            counted = config.model_copy(update=counts)
            indexes = config.engine.device_indexes
            self._report = Report(phase=Phase.STARTING, starts=number, device_indexes=indexes)
            self._run_task = asyncio.create_task(self._run(counted, timeout_s))

    def refuse(self, number: int, error: BatonError) -> None:
        """Records the `number`-th start as failed without starting a process."""
        self._report = Report(phase=Phase.ENDED, starts=number, failure=_failure(error))

    def drain(self) -> None:
        """Makes the worker drain and end, without waiting for it."""
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """Kills both processes of the worker, even stopped ones."""
        if self._child is not None:
            self._child.kill()

    async def stop(self, within_s: float) -> None:
        """Drains the worker and kills it after `within_s` seconds; returns when it has ended."""
        if self._run_task is None:
            return
        deadline = asyncio.get_running_loop().time() + within_s
        while self._child is None and not self._run_task.done():  # noqa: ASYNC110 (it is being forked)
            await asyncio.sleep(_FORK_POLL_S)
        if self._child is not None:
            await self._child.stop(deadline)
        await self._run_task

    async def _run(self, config: WorkerConfig, timeout_s: float) -> None:
        """One process, from its start to its end."""
        failure: BatonError | ChildError | None = None
        try:
            self._child = await Child.start(config.name, self._program, config.model_dump_json())
            self._on_process(self._child.pid)
            addresses = await self._child.ready(timeout_s)
            await self._serve(self._child, addresses["grpc"], config)
            failure = await self._child.death()
        except (BatonError, ChildError) as error:
            failure = error
        except Exception as error:
            _log.exception("worker_watch_failed", worker=config.name)
            failure = BatonError(ErrorKind.INTERNAL, f"{config.name}: {type(error).__name__}: {error}")
        finally:
            if self._child is not None:
                self._child.kill()
                await self._child.ended()
                self._child = None
            self._on_process(None)
            self._exchange_timeouts += _cause(failure) is FailureCause.EXCHANGE
            self._update(phase=Phase.ENDED, failure=_failure(failure))

    async def _serve(self, child: Child, address: str, config: WorkerConfig) -> None:
        """Sends heartbeats until the process ends, over TLS with the worker's own certificate."""
        tls = None
        if config.tls:
            from services.common.rpc.mutual_tls import mutual_tls  # `cryptography` takes 50 ms to import

            tls = mutual_tls(config.tls, config.role).twin()
        ended = asyncio.create_task(child.ended())
        async with internal_channel(address, channel_options(), config.cluster_secret, tls) as channel:
            worker: WorkerServiceAsyncStub = WorkerServiceStub(channel)
            self._watch = ProcessWatch(child.pid)
            heartbeats = asyncio.create_task(self._heartbeats(worker, address, self._watch))
            try:
                await asyncio.wait({ended, heartbeats}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    heartbeats.result()
            finally:
                heartbeats.cancel()
                ended.cancel()
                await asyncio.gather(heartbeats, ended, return_exceptions=True)

    async def _heartbeats(self, worker: WorkerServiceAsyncStub, address: str, watch: ProcessWatch) -> None:
        self._update(phase=Phase.SERVING, address=address)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if self._report.incarnation:
                    described = await worker.Describe(DescribeRequest(), timeout=_ANSWER_S)
                    self._update(unready=described.unready)
                else:
                    await self._identify(worker)
                watch.progressed()
            await asyncio.sleep(HEARTBEAT_S)

    async def _identify(self, worker: WorkerServiceAsyncStub) -> None:
        """Reads the worker's incarnation and process ids, once."""
        report = (await worker.GetAudit(GetAuditRequest(), timeout=_ANSWER_S)).report
        described = await worker.Describe(DescribeRequest(), timeout=_ANSWER_S)
        self._update(
            front_pid=report.front_pid,
            engine_pid=report.engine_pid,
            incarnation=described.identity.incarnation.hex(),
            unready=described.unready,
        )

    def _update(self, **fields: object) -> None:
        self._report = self._report.model_copy(update=fields)


def _cause(error: BatonError | ChildError | None) -> FailureCause | None:
    reported = error.reported if isinstance(error, ChildError) else error
    return None if reported is None else reported.cause


def _failure(error: BatonError | ChildError | None) -> Failure | None:
    if isinstance(error, BatonError):
        return Failure(kind=error.kind.name, message=error.message)
    if error is None:
        return None
    kind = ErrorKind.CONFLICT if error.replaced else ErrorKind.UNAVAILABLE
    return Failure(kind=kind.name, message=str(error))
