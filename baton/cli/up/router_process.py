"""The router of `baton up`: started again, with its ports and configuration, whenever it ends unasked.

A client of a router that dies gets a connection error and may try again in a second. The workers go on, and
end the dead router's sequences after a grace of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from baton.cli.common.messages import say
from baton.errors import BatonError
from services.common.config.router import RouterConfig
from services.common.processes.child_process import Child, ChildError

# Before the second restart in a row, and doubled before each further one, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
# One that lived for so long ends the row.
LASTING_S = 60.0
# Where a key of the ready line's addresses has its port in the configuration.
_PORTS = {
    "http": "http_port",
    "grpc": "grpc_port",
    "admin": "admin_grpc_port",
    "admin_http": "admin_http_port",
}

Failure = BatonError | ChildError


class KeptRouter:
    """Owns the router's process. `spawn`, then `ready`; `stop` in the end, whatever they did.

    `restarts`: how many in a row are tried before `failure` returns.
    """

    def __init__(self, command: Sequence[str], config: RouterConfig, restarts: int) -> None:
        self._command = command
        self._config = config
        self._restarts = restarts
        self._child: Child | None = None
        self._keeping: asyncio.Task[Failure] | None = None
        self._stopping = asyncio.Event()
        # The latest value of each message, for a router that is started again.
        self._told: dict[str, Any] = {}
        self._places: dict[str, socket.socket] = {}

    async def spawn(self) -> None:
        """Starts it for the first time."""
        self._child = await self._start()

    async def ready(self, timeout_s: float) -> dict[str, str]:
        """Its addresses, each `host:port`, once it serves; from then on it is kept running there.

        Raises `BatonError` for what it refuses, `ChildError` where it ends or is not ready in time.
        """
        assert self._child is not None
        addresses = await self._child.ready(timeout_s)
        ports = {_PORTS[key]: _split(address)[1] for key, address in addresses.items()}
        self._config = self._config.model_copy(update=ports)
        self._keeping = asyncio.create_task(self._keep(addresses.values()))
        return addresses

    def tell(self, message: Mapping[str, Any]) -> None:
        """Passes a message on, to later starts of the router too."""
        self._told |= message
        if self._child is not None:
            self._child.send(message)

    async def failure(self) -> Failure:
        """Returns the last error once no more restarts are tried. Only after `ready`."""
        assert self._keeping is not None
        return await asyncio.shield(self._keeping)

    async def stop(self, deadline: float) -> None:
        """Lets it drain until `deadline` (loop time), then kills it; starts no other."""
        self._stopping.set()
        if self._child is not None:
            await self._child.stop(deadline)
        if self._keeping is not None:
            await asyncio.gather(self._keeping, return_exceptions=True)
        for place in self._places.values():
            place.close()

    def kill(self) -> None:
        """Kills it at once; `stop` still has to be awaited."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _start(self) -> Child:
        child = await Child.start("router", self._command, self._config.model_dump_json(), keep_stdin=True)
        if self._told:
            child.send(self._told)
        return child

    async def _keep(self, addresses: Collection[str]) -> Failure:
        """Starts it again whenever it ends. Returns its last error at a stop, or after too many restarts in a
        row."""
        assert self._child is not None
        loop = asyncio.get_running_loop()
        in_a_row, began = 0, loop.time()
        await self._child.ended()
        failure: Failure = await self._child.death()
        while True:
            in_a_row = 1 if loop.time() - began > LASTING_S else in_a_row + 1
            if self._stopping.is_set() or in_a_row > self._restarts:
                return failure
            self._hold(addresses)
            pause_s = 0.0 if in_a_row == 1 else min(FIRST_PAUSE_S * 2.0 ** (in_a_row - 2), LONGEST_PAUSE_S)
            say(f"{_text(failure)}; starting the router again" + (f" in {pause_s:g} s" if pause_s else ""))
            if await self._stopped_within(pause_s):
                return failure
            began = loop.time()
            failure = await self._run_again()

    async def _run_again(self) -> Failure:
        """One more process, from its start to its end."""
        try:
            self._child = await self._start()
        except OSError as error:
            return ChildError(f"router cannot be started: {error.strerror}")
        if self._stopping.is_set():  # `stop` knew only of the one before
            self._child.kill()
        try:
            # Without a limit: it says so once it has found workers, and they may be away for long.
            await self._child.ready(float("inf"))
            say("the router serves again")
            await self._child.ended()
            return await self._child.death()
        except (BatonError, ChildError) as error:
            self._child.kill()
            await self._child.ended()
            return error

    async def _stopped_within(self, pause_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()
        return self._stopping.is_set()

    def _hold(self, addresses: Collection[str]) -> None:
        """Keeps the kernel from giving its ports to another process that asks for any free one: with a socket
        that is bound and never listens, beside which the router can bind."""
        for address in addresses:
            if address not in self._places and (place := _bound(*_split(address))) is not None:
                self._places[address] = place


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _bound(host: str, port: int) -> socket.socket | None:
    """None where the port cannot be bound: then the router's own error tells why."""
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
    except OSError:
        place.close()
        return None
    return place


def _text(failure: Failure) -> str:
    return failure.message if isinstance(failure, BatonError) else str(failure)
