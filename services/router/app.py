"""Assembles the router: directory, waiting room, dispatcher, public and admin servers; and stops it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from baton.addresses import is_loopback
from baton.cluster_auth import secret_name
from baton.errors import BatonError, ErrorKind
from services.common.observability.logs import get_log
from services.common.rpc.grpc_server import GrpcServer, public_options
from services.router.api.admin_api import ADMIN_SERVICE_NAME, AdminService
from services.router.api.admin_http import admin_app
from services.router.api.grpc_api import SERVICE_NAME, GrpcDoor
from services.router.api.http_api import HttpDoor
from services.router.http.connections import Connections
from services.router.http.descriptors import ADMIN_LIMITS, connection_budget
from services.router.http.server import HttpServer
from services.router.lifecycle.admission import Intake
from services.router.lifecycle.cancels import Cancels
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.lifecycle.observations import Observations
from services.router.lifecycle.request_lifecycle import LifecycleDeps
from services.router.lifecycle.service import Service
from services.router.lifecycle.unread import Unread
from services.router.observability.metrics import RouterMetrics, metrics_route
from services.router.observability.status import Status
from services.router.observability.store import Store
from services.router.observability.window import Window
from services.router.request.sizes import max_body_bytes as default_max_body_bytes
from services.router.text.model_info import ModelInfo
from services.router.text.tokenizer import ModelText
from services.router.tokenization.helper_processes import HelperSettings, TextProcesses
from services.router.tokenization.tokenizer_pool import TextPool
from services.router.workers.directory import Directory
from services.router.workers.discovery import Discovery
from services.router.workers.placement import Placement
from services.router.workers.pools import Pools
from services.router.workers.prefix_affinity import Prefixes
from services.router.workers.waiting_queue import WaitingRoom

if TYPE_CHECKING:
    from services.common.config.router import RouterConfig

_STOP_GRACE_S = 1.0
_ADMIN_MESSAGE_BYTES = 64 * 1024

_log = get_log("router")
# The largest request of AdminService names a worker or a pool.
_ADMIN_MESSAGE_BYTES = 64 * 1024


class Router:
    """The door. `start`, wait until `usable`, serve, `stop`. Make it from a running loop."""

    def __init__(self, config: RouterConfig) -> None:
        """Reads the model folder; BatonError(INVALID) where it lacks something, or Redis's URL is wrong."""
        folder = Path(config.model)
        info = ModelInfo.load(folder, byte_tokenizer=config.byte_tokenizer)
        self._config = config
        self.store = Store(config.state)
        max_body_bytes = config.max_body_bytes or default_max_body_bytes(info.max_context_tokens)
        self._pool = TextPool(
            ModelText(folder, info, bytes_only=config.byte_tokenizer),
            TextProcesses(HelperSettings(str(folder), config.byte_tokenizer, max_body_bytes)),
            config.tokenizer_threads,
            config.max_waiting,
        )
        self.directory = Directory(config.workers, self._workers_changed, config.cluster_secret)
        self.discovery = Discovery(
            self.directory, config.served_model_name, config.workers, secret_name(config.cluster_secret)
        )
        self.pools = Pools(
            config.served_model_name, info.tokenizer_digest, config.pool, lambda: self.directory.workers
        )
        self.placement = Placement(self.directory, self.pools, config.prefill_ahead_tokens)
        self.room = WaitingRoom(
            self.placement, config.max_waiting, config.queue_timeout_s, config.waiting_share
        )
        self.cancels = Cancels()
        self.directory.on_orphan = self.cancels.end_orphan
        self.observations = Observations()
        self.prefixes = Prefixes(config.prefix_secret, lambda: self.directory.workers, self.store.state)
        self.dispatcher = Dispatcher(
            LifecycleDeps(
                room=self.room,
                cancels=self.cancels,
                max_attempts=config.max_attempts,
                observations=self.observations,
                prefixes=self.prefixes,
                unread=Unread(config.connections.max_unread_mb << 20),
                journal=self.store.journal,
            )
        )
        intake = Intake(
            config.served_model_name,
            info,
            self._pool,
            self.pools,
            config.request_timeout_s,
            max_body_bytes,
        )
        self.service = Service(intake, self.dispatcher, self.placement, config.max_answer_values)
        budget = connection_budget(config.connections)
        self.connections = Connections(config.connections, budget.http)
        self.grpc = GrpcServer(
            [SERVICE_NAME], options=public_options(config.connections, budget.grpc, max_body_bytes)
        )
        self._window = Window(self.observations)
        self._addresses: dict[str, str] = {}
        status = Status(
            self.service,
            self.room,
            self.directory,
            self.store,
            self._window,
            time.monotonic(),
            self._addresses,
            self.pools,
        )
        GrpcDoor(self.service, status, config.connections.read_grace_s).register(self.grpc.server)
        registry = CollectorRegistry()
        self._metrics().register(registry)
        more_routes = [metrics_route(registry)] if config.serves_public_metrics else []
        self.http_door = HttpDoor(self.service, more_routes)
        self.http = HttpServer(self.http_door.app, self.connections, config.allowed_hosts)
        options = public_options(ADMIN_LIMITS, ADMIN_LIMITS.max_grpc_connections, _ADMIN_MESSAGE_BYTES)
        self.admin_grpc = GrpcServer([ADMIN_SERVICE_NAME], _admin_secret(config), "admin", options)
        admin = AdminService(status, self.directory, self.dispatcher, self.pools, self._workers_changed)
        admin.register(self.admin_grpc.server)
        self.admin_http = HttpServer(
            admin_app(self.service, registry), Connections(ADMIN_LIMITS), config.allowed_hosts
        )
        self._was_usable = False
        # Who waits for usable() to change.
        self._watches: set[asyncio.Event] = set()
        self._beside: list[asyncio.Task[None]] = []

    async def start(self) -> dict[str, str]:
        """Opens the public and the admin ports.

        Returns host:port of `grpc`, `http`, `admin` (gRPC) and `admin_http`. BatonError(INVALID) where a port
        is taken.
        """
        config = self._config
        admin_grpc_port, admin_http_port = config.admin_ports
        self._addresses["http"] = self.http.bind(config.host, config.http_port)
        self._addresses["admin_http"] = self.admin_http.bind(config.admin_host, admin_http_port)
        self._addresses["grpc"] = await self.grpc.start(config.host, config.grpc_port)
        self._addresses["admin"] = await self.admin_grpc.start(config.admin_host, admin_grpc_port)
        await self.admin_grpc.set_serving(True)  # as long as it answers; readiness is the public port's
        await asyncio.gather(self.http.start(), self.admin_http.start())
        self.directory.start()
        self.store.watch(lambda members: self.discovery.take(members.values()))
        self._beside = [asyncio.create_task(self._tell_health()), asyncio.create_task(self._window.run())]
        return dict(self._addresses)

    async def usable(self) -> None:
        """Returns once a request would be served."""
        await self._until(usable=True)

    async def stop(self, drain_s: float) -> None:
        """Drains: nothing new, running requests end within `drain_s`, the rest is cancelled."""
        await self.grpc.set_serving(False)
        await self.dispatcher.drain(drain_s)
        for task in self._beside:
            task.cancel()
        await self.prefixes.close()
        await asyncio.gather(
            self.http.stop(),
            self.grpc.stop(_STOP_GRACE_S),
            self.admin_http.stop(),
            self.admin_grpc.stop(_STOP_GRACE_S),
            self.store.close(),
        )
        await self.directory.stop()
        self._pool.close()

    def _metrics(self) -> RouterMetrics:
        return RouterMetrics(
            model=self._config.served_model_name,
            observations=self.observations,
            dispatcher=self.dispatcher,
            room=self.room,
            cancels=self.cancels,
            directory=self.directory,
            store=self.store,
            connections=self.connections,
        )

    def _workers_changed(self) -> None:
        """Some worker came, went, or has more or less room."""
        self.pools.review()
        self.prefixes.forget_lost()
        self.room.place_waiting()
        usable = self.service.usable()
        if usable != self._was_usable:
            self._was_usable = usable
            for waiting in self._watches:
                waiting.set()

    async def _until(self, *, usable: bool) -> None:
        changed = asyncio.Event()
        self._watches.add(changed)
        try:
            while self.service.usable() != usable:
                changed.clear()
                await changed.wait()
        finally:
            self._watches.discard(changed)

    async def _tell_health(self) -> None:
        """Keeps grpc.health.v1 true."""
        while True:
            for usable in (True, False):
                await self._until(usable=usable)
                await self.grpc.set_serving(usable)
                _log.info("usable" if usable else "not_usable")


def _admin_secret(config: RouterConfig) -> str:
    """The secret that callers of AdminService must know; empty where only this machine reaches it.

    BatonError(INVALID) where other machines reach it and there is none.
    """
    if is_loopback(config.admin_host):
        return ""
    if not config.cluster_secret:
        raise BatonError(ErrorKind.INVALID, f"an admin port on {config.admin_host} needs a cluster_secret")
    return config.cluster_secret
