"""A worker's front process: starts the engine process and serves gRPC, prefill's or decode's servicer by
role.

Torch-free. Front and engine share one incarnation: when either process ends, so does the other. The front
kills an engine that hangs.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from baton.base.addresses import is_loopback, join_address, split_address
from baton.base.errors import BatonError, ErrorKind, NameTakenError
from baton.base.process_tuning import batch_wakeups, switch_threads_often
from baton.base.process_watch import ProcessWatch
from baton.v1 import decode_pb2, prefill_pb2, worker_pb2
from baton.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from baton.v1.engine_pb2 import EngineCommand, EngineEvent, ReadyEvent, StopCommand
from baton.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import IntegrityReport
from baton.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from services.common.config.plaintext import plaintext_ports
from services.common.config.worker import WorkerConfig
from services.common.engine.client import EngineClient
from services.common.engine.launch import identity_of
from services.common.engine.rings import worker_rings
from services.common.observability.admin_http import AdminHttp
from services.common.observability.fault_barrier import FaultBarrier
from services.common.observability.logs import configure_logs, get_log
from services.common.observability.metrics_server import MetricsServer
from services.common.observability.tracing.configured import configured_recorder
from services.common.observability.tracing.recorder import SpanRecorder
from services.common.processes.child_protocol import (
    RestartNeededError,
    StopSignal,
    detached,
    report_ready,
)
from services.common.processes.drain import Drain
from services.common.rpc.grpc_server import GrpcServer
from services.decode.servicer import DecodeServicer
from services.grammar.client import MaskClient
from services.grammar.grammar_kinds import OUTPUT_FORMATS
from services.prefill.servicer import PrefillServicer
from services.worker.front.canary import INTERVAL_S, Canary, report_of
from services.worker.front.engine_handle import ENGINE_PROGRAM, EngineHandle, detect_hang, start_engine
from services.worker.front.metrics import WorkerMetrics
from services.worker.front.name_wait import wait_for_name
from services.worker.front.probes import WorkerProbes
from services.worker.front.worker_servicer import WorkerServicer

if TYPE_CHECKING:
    from services.worker.front.front_tls import FrontTls
    from services.worker.front.registration import Registration

_SERVER_GRACE_S = 1.0
# How long the engine's last event may take once the front cannot write to it any more.
_LAST_EVENT_S = 1.0
_LAST_SPANS_S = 1.0

log = get_log(__name__)


async def serve(
    config: WorkerConfig, stop: StopSignal, engine_program: Sequence[str] = ENGINE_PROGRAM
) -> None:
    """Runs a worker until `stop` is signalled. Raises BatonError where it cannot serve or its engine ends."""
    configure_logs(config.log_level, process="front", worker=config.name)
    _check_secret(config)
    for port in plaintext_ports(config):
        log.warning("plaintext_port", host=config.bound_host, port=port)
    tls = _front_tls(config)
    spans = configured_recorder(config.tracing, f"baton-{config.role}", config.name)
    identity = identity_of(config, secrets.token_bytes(16), time.time_ns())
    handle = await start_engine(config, identity, engine_program)
    if spans is not None:
        switch_threads_often()
    batch_wakeups()  # in this process alone: the engine's timers stay exact
    taken: NameTakenError | None = None
    try:
        await _Front(config, identity, handle, _registration(config, tls), tls, spans).run(stop)
    except NameTakenError as error:
        if not (error.kept and detached()):  # a supervisor starts it again, with pauses of its own
            raise
        taken = error
    finally:
        log.info("engine_ended", code=await handle.stop())
        if spans is not None:
            await asyncio.to_thread(spans.close, _LAST_SPANS_S)
    registration = _registration(config, tls) if taken is not None else None
    if taken is not None and registration is not None:
        await wait_for_name(registration, taken, stop, config.start_timeout_s)


def _check_secret(config: WorkerConfig) -> None:
    """Raises BatonError(INVALID) where other machines could call this worker without authentication."""
    if not config.cluster_secret:
        if not is_loopback(config.bound_host):
            raise BatonError(ErrorKind.INVALID, f"a worker on {config.bound_host} needs a cluster_secret")
        log.warning("no_cluster_secret", host=config.bound_host)


def _front_tls(config: WorkerConfig) -> FrontTls | None:
    """TLS, where it is configured. Raises BatonError(INVALID) where its files cannot be used."""
    if config.tls is None:
        return None
    from services.worker.front.front_tls import FrontTls  # `cryptography` takes 50 ms to import

    return FrontTls(config, config.tls)


def _registration(config: WorkerConfig, tls: FrontTls | None) -> Registration | None:
    """The registration, where state is configured. Its imports take 0.2 s, so they are made while the engine
    loads."""
    if config.state is None:
        return None
    from services.worker.front.registration import Registration

    return Registration(config, config.state, tls)


class _Front:
    """One start of a worker's front."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: WorkerIdentity,
        handle: EngineHandle,
        registration: Registration | None,
        tls: FrontTls | None,
        spans: SpanRecorder | None,
    ) -> None:
        self._config = config
        self._spans = spans
        self._tls = tls
        self._registration = registration
        self._handle = handle
        self._identity = identity
        self._engine = EngineClient(handle.channel)
        self._drain = Drain()
        self._ready: asyncio.Future[ReadyEvent] = asyncio.get_running_loop().create_future()
        # Why the engine asks to be replaced.
        self._restart: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        rings = worker_rings(config.engine)
        self._heartbeat = rings.heartbeat(handle.memory)
        reports_output = config.role != "prefill" and config.engine.prefix_cache
        self._decode = DecodeServicer(
            identity.incarnation,
            self._engine,
            rings.reader(handle.memory),
            rings.progress(handle.memory),
            handle.stepped,
            self._drain,
            reports_output,
            speculates=rings.rows_per_slot > 1,
        )
        self._masks = None if handle.masks is None else MaskClient(handle.masks, self._decode.on_mask_failed)
        self._decode.masks = self._masks
        self._decode.spans = spans
        canary = Canary(config.role, self._engine, self._decode, INTERVAL_S) if config.canary else None
        self._probes = WorkerProbes(self._drain, registration, canary)
        self._registry = CollectorRegistry()
        self._metrics = MetricsServer()
        self._admin = AdminHttp(self._probes, self._registry)

    async def run(self, stop: StopSignal) -> None:
        """Serves until `stop`. Raises the BatonError that ended the engine, or `RestartNeededError` after a
        drain because the engine asks to be replaced."""
        engine = asyncio.create_task(self._engine.run(self._on_event))
        stopping = asyncio.create_task(stop.wait())
        polling = asyncio.create_task(self._decode.run())
        excluded = asyncio.create_task(self._excluded())
        watching: asyncio.Task[None] | None = None
        probing: asyncio.Task[None] | None = None
        server: GrpcServer | None = None
        try:
            admin = await self._start_admin()
            ready = await self._engine_ready(engine, stopping, excluded)
            if ready is None:
                self._handle.abort()
                return
            watching = asyncio.create_task(self._watch_engine())
            server = self._server()
            await self._start_server(server, ready, admin)
            probing = asyncio.create_task(self._probe())
            ends: set[asyncio.Future[Any]] = {engine, stopping, polling, excluded, watching, self._restart}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not (stopping.done() or excluded.done() or self._restart.done()):
                raise await self._reason(engine, polling)
            await self._finish(server, engine)
            if not stopping.done():
                raise excluded.result() if excluded.done() else RestartNeededError(self._restart.result())
        finally:
            for task in (probing, watching):  # an engine that is stopping writes no heartbeat
                if task is not None:
                    task.cancel()
            self._decode.end()
            if server is not None:
                await server.stop(_SERVER_GRACE_S)
            if self._registration is not None:
                await self._registration.close()
            if self._masks is not None:
                await self._masks.stop()
            await self._metrics.stop()
            await self._admin.stop()
            started = (polling, stopping, engine, excluded, watching, probing)
            tasks = [task for task in started if task is not None]
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _engine_ready(
        self,
        engine: asyncio.Task[BatonError],
        stopping: asyncio.Task[None],
        excluded: asyncio.Task[BatonError],
    ) -> ReadyEvent | None:
        """The engine's first event; None where `stop` was signalled before."""
        waits: set[asyncio.Future[Any]] = {engine, stopping, excluded, self._ready}
        timeout_s = self._config.start_timeout_s
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ready in done:
            return self._ready.result()
        if stopping in done:
            return None
        if excluded in done:
            self._handle.abort()
            raise excluded.result()
        if engine in done:
            raise engine.result()
        self._handle.abort()
        raise BatonError(ErrorKind.DEADLINE, f"the engine was not ready within {timeout_s:g} s")

    async def _excluded(self) -> BatonError:
        """Returns why the registry excludes this worker; never returns while it does not."""
        if self._registration is None:
            never: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
            return await never
        return await self._registration.excluded()

    def _server(self) -> GrpcServer:
        names = [worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name]
        if self._config.role in ("prefill", "both"):
            names.append(prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name)
        if self._config.role in ("decode", "both"):
            names.append(decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name)
        tls = None if self._tls is None else self._tls.server
        return GrpcServer(names, self._config.cluster_secret, interceptors=[FaultBarrier()], tls=tls)

    async def _start_admin(self) -> str:
        """Opens the admin HTTP port; its address, or "" where none is configured."""
        config = self._config
        if config.admin_http_port is None:
            return ""
        return self._reached_at(await self._admin.start(config.bound_host, config.admin_http_port))

    def _reached_at(self, bound: str) -> str:
        """The address by which others reach a port that is bound at `bound`."""
        return join_address(self._config.host, split_address(bound)[1])

    async def _probe(self) -> None:
        """Runs canary generations, where the configuration wants them, until cancelled."""
        if self._probes.canary is not None:
            await self._probes.canary.run()

    async def _start_server(self, server: GrpcServer, ready: ReadyEvent, admin: str) -> None:
        metrics = await self._start_metrics() or admin
        if self._masks is not None:
            ready.limits.output_formats.extend(OUTPUT_FORMATS)
        servicer = WorkerServicer(
            self._engine, self._identity, ready, self._drain, self._probes.unready, metrics
        )
        add_WorkerServiceServicer_to_server(servicer, server.server)
        if self._config.role in ("prefill", "both"):
            add_PrefillServiceServicer_to_server(
                PrefillServicer(self._engine, self._drain, self._masks, self._spans), server.server
            )
        if self._config.role in ("decode", "both"):
            add_DecodeServiceServicer_to_server(self._decode, server.server)
        address = self._reached_at(await server.start(self._config.bound_host, self._config.port))
        await server.set_serving(True)
        addresses = {"grpc": address, "transfer": _endpoints_text(ready), "metrics": metrics}
        if admin:
            addresses["admin_http"] = admin
        self._probes.loaded = True
        report_ready({**addresses, "device": ready.device})
        gc.freeze()  # a collection over all loaded objects would delay every stream
        log.info("serving", role=self._config.role, device=ready.device, **addresses)
        if self._registration is not None:
            await servicer.update_load()
            self._registration.register(self._config.served_name, servicer, addresses)

    async def _start_metrics(self) -> str:
        """Registers the metrics and opens their own endpoint; its address, or "" where none is configured."""
        config = self._config
        metrics = WorkerMetrics(
            labels={"role": config.role, "worker": config.name, "model": self._config.served_name},
            report=self._report,
            loop=asyncio.get_running_loop(),
            restarts=config.restarts,
            exchange_timeouts=config.exchange_timeouts,
            decode=self._decode,
            probes=self._probes,
            spans=self._spans,
            registration=self._registration,
        )
        metrics.register(self._registry, self._handle.process.pid)
        if config.metrics_port is None:
            return ""
        return self._reached_at(
            await self._metrics.start(self._registry, config.bound_host, config.metrics_port)
        )

    async def _report(self) -> IntegrityReport:
        return await report_of(self._engine)

    async def _finish(self, server: GrpcServer, engine: asyncio.Task[BatonError]) -> None:
        """Refuses new work, waits for running work to end, then stops the engine."""
        await server.set_serving(False)
        if self._registration is not None:
            self._registration.drain()
        drained = await self._drain.wait(
            lambda: self._busy() and not (self._probes.hung or engine.done()), self._config.drain_s
        )
        if self._probes.hung or engine.done():
            raise self._end_of(engine)
        log.info("drained" if drained else "drain_incomplete")
        await self._engine.call(EngineCommand(stop=StopCommand()))

    def _busy(self) -> bool:
        return bool(self._engine.prefills or self._decode.live)

    def _on_event(self, event: EngineEvent) -> None:
        if event.WhichOneof("event") == "ready" and not self._ready.done():
            self._ready.set_result(event.ready)
        elif event.WhichOneof("event") == "restart_needed":
            if not self._restart.done():
                log.error("engine_restart_needed", reason=event.restart_needed.reason)
                self._restart.set_result(event.restart_needed.reason)
        elif event.WhichOneof("event") == "prefixes":
            if self._registration is not None:
                self._registration.publish_prefixes(self._identity.incarnation, event.prefixes)
        else:
            self._decode.on_event(event)

    async def _watch_engine(self) -> None:
        """Kills the engine once it counts as hung, which ends this worker."""
        self._probes.hung = await detect_hang(self._heartbeat, ProcessWatch(self._handle.process.pid))
        log.error("engine_hung", reason=self._probes.hung)
        self._handle.abort()

    async def _reason(self, engine: asyncio.Task[BatonError], polling: asyncio.Task[None]) -> BatonError:
        """Says why a worker has to end without having been stopped."""
        if polling.done() and not engine.done():
            await asyncio.wait({engine}, timeout=_LAST_EVENT_S)
        if self._probes.hung or engine.done():
            return self._end_of(engine)
        log.error("output_ring_reader_failed", error=repr(polling.exception()))
        return BatonError(ErrorKind.INTERNAL, "the reader of the output ring failed")

    def _end_of(self, engine: asyncio.Task[BatonError]) -> BatonError:
        """Says why the engine ended or was killed."""
        return BatonError(ErrorKind.UNAVAILABLE, self._probes.hung) if self._probes.hung else engine.result()


def _endpoints_text(ready: ReadyEvent) -> str:
    """The endpoints of the engine's receiver, for people: a scheme for all transports but grpc."""
    endpoints = ready.transfer_endpoints
    return " ".join(
        one.address if one.transport == "grpc" else f"{one.transport}:{one.address}" for one in endpoints
    )
