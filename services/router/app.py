"""Puts the router together: directory, waiting room, dispatcher, both doors; and takes it apart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from services.common.grpc_server import GrpcServer
from services.common.logs import get_log
from services.router.cancels import Cancels
from services.router.directory import Directory
from services.router.discovery import Discovery
from services.router.dispatch import Dispatcher
from services.router.grpc_door import SERVICE_NAME, GrpcDoor
from services.router.http_door import HttpDoor
from services.router.http_server import HttpServer
from services.router.intake import Intake
from services.router.metrics import RouterMetrics, metrics_route
from services.router.model_info import ModelInfo
from services.router.observations import Observations
from services.router.placement import Placement
from services.router.prefixes import Prefixes
from services.router.service import Service
from services.router.status import Status
from services.router.store import Store
from services.router.text_pool import TextPool
from services.router.waiting_room import WaitingRoom
from services.router.window import Window

if TYPE_CHECKING:
    from services.common.config import RouterConfig

_STOP_GRACE_S = 1.0

_log = get_log("router")


class Router:
    """The door. `start`, wait until `usable`, serve, `stop`. Make it from a running loop."""

    def __init__(self, config: RouterConfig) -> None:
        """Reads the model folder; BatonError(INVALID) where it lacks something, or Redis's URL is wrong."""
        folder = Path(config.model)
        info = ModelInfo.load(folder)
        self._config = config
        self.store = Store(config.state)
        self._pool = TextPool(
            folder, info, config.tokenizer_threads, config.max_waiting, bytes_only=config.byte_tokenizer
        )
        self.directory = Directory(config.workers, self._workers_changed)
        self.discovery = Discovery(self.directory, config.served_model_name, config.workers)
        self.placement = Placement(self.directory, config.prefill_ahead_tokens)
        self.room = WaitingRoom(self.placement, config.max_waiting, config.queue_timeout_s)
        self.cancels = Cancels()
        self.observations = Observations()
        self.prefixes = Prefixes(config.prefix_secret, lambda: self.directory.workers, self.store.state)
        self.dispatcher = Dispatcher(
            self.room,
            self.cancels,
            config.max_attempts,
            self.observations,
            self.prefixes,
            self.store.journal,
        )
        intake = Intake(config.served_model_name, info, self._pool, self.directory, config.request_timeout_s)
        self.service = Service(intake, self.dispatcher, self.placement)
        self.grpc = GrpcServer([SERVICE_NAME])
        self._window = Window(self.observations)
        started = time.monotonic()
        status = Status(self.service, self.room, self.directory, self.store, self._window, started)
        GrpcDoor(self.service, status).register(self.grpc.server)
        registry = CollectorRegistry()
        self._metrics().register(registry)
        self.http_door = HttpDoor(self.service, [metrics_route(registry)])
        self.http = HttpServer(self.http_door.app)
        self._was_usable = False
        # Who waits for usable() to change.
        self._watches: set[asyncio.Event] = set()
        self._beside: list[asyncio.Task[None]] = []

    async def start(self) -> dict[str, str]:
        """Opens both doors; returns their addresses. BatonError(INVALID) where a port is taken."""
        config = self._config
        http_address = self.http.bind(config.host, config.http_port)
        grpc_address = await self.grpc.start(config.host, config.grpc_port)
        await self.http.start()
        self.directory.start()
        self.store.watch(lambda members: self.discovery.take(members.values()))
        self._beside = [asyncio.create_task(self._tell_health()), asyncio.create_task(self._window.run())]
        return {"grpc": grpc_address, "http": http_address}

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
        await asyncio.gather(self.http.stop(), self.grpc.stop(_STOP_GRACE_S), self.store.close())
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
        )

    def _workers_changed(self) -> None:
        """Some worker came, went, or has more or less room."""
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
