"""Services: their addresses forward to the pods that are ready, connection by connection, like kube-proxy."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable

from tests.manifests.manifests import Service, ServicePort
from tests.manifests.pod import Pod

_CHUNK = 65536


class ServiceProxy:
    """Listens at a Service's address. `pods`: those that are there now."""

    def __init__(self, service: Service, address: str, pods: Callable[[], Iterable[Pod]]) -> None:
        self.service = service
        self.address = address
        self._pods = pods
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._dice = random.Random(0)

    async def start(self) -> None:
        for port in self.service.ports:
            self._servers.append(await self._listen(port))

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def pod_addresses(self) -> list[str]:
        """Addresses of the Service's ready pods, or of all where it publishes those that are not ready."""
        return [
            pod.address
            for pod in self._pods()
            if (pod.ready or self.service.not_ready_too)
            and not pod.terminating
            and self.service.selector.items() <= pod.template.labels.items()
        ]

    def endpoints(self, port: ServicePort) -> list[tuple[str, int]]:
        """Address and port of each ready pod."""
        return [
            (pod.address, pod.template.container.ports[port.target])
            for pod in self._pods()
            if pod.ready and self.service.selector.items() <= pod.template.labels.items()
        ]

    async def _listen(self, port: ServicePort) -> asyncio.Server:
        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._forward(port, reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            # Also of a task that is cancelled before it begins.
            task.add_done_callback(lambda _: writer.close())

        return await asyncio.start_server(accepted, self.address, port.port)

    async def _forward(
        self, port: ServicePort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        endpoints = self.endpoints(port)
        if not endpoints:
            return
        with contextlib.suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection(*self._dice.choice(endpoints))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pump(reader, to_writer))
                    group.create_task(_pump(to_reader, writer))
            finally:
                to_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until one side ends, and passes that on."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
