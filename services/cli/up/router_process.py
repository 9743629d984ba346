"""The router process of `baton up`, restarted with the same ports and configuration whenever it ends
unexpectedly or hangs.

Clients of a router that dies get a connection error and may retry a second later. The workers continue, and
end the dead router's sequences after a grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from baton.base.addresses import listening_family, listening_host
from baton.base.errors import BatonError
from services.cli.common.messages import notify
from services.common.config.router import RouterConfig
from services.common.processes.child_process import Child, ChildError
from services.common.processes.child_watch import ChildWatch

# Pause before the second restart in a row; it doubles before each further one, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
# A router that lived this long resets the count of restarts in a row.
LASTING_S = 60.0
# The setting of the port of each address in the ready line.
_PORTS = {
    "http": "http_port",
    "grpc": "grpc_port",
    "admin": "admin_grpc_port",
    "admin_http": "admin_http_port",
}

Failure = BatonError | ChildError


class RouterProcess:
    """Owns the router's process. Call `spawn`, then `ready`, and `stop` in the end, even after a failure.

    `restarts`: the most restarts in a row before `failure` returns.
    """

    def __init__(self, command: Sequence[str], config: RouterConfig, restarts: int) -> None:
        self._command = command
        self._config = config
        self._restarts = restarts
        self._child: Child | None = None
        self._watching: asyncio.Task[None] | None = None
        self._supervising: asyncio.Task[Failure] | None = None
        self._stopping = asyncio.Event()
        # The latest value of each message, for a restarted router.
        self._messages: dict[str, Any] = {}
        self._reserved: dict[str, socket.socket] = {}

    async def spawn(self) -> None:
        """Starts it for the first time."""
        self._child = await self._start()

    async def ready(self, timeout_s: float) -> dict[str, str]:
        """Returns its addresses, each `host:port`, once it serves; from then on it is restarted at those when
        it ends.

        Raises `BatonError` where it refuses its configuration, `ChildError` where it ends or is not ready in
        time.
        """
        assert self._child is not None
        addresses = await self._child.ready(timeout_s)
        ports = {_PORTS[key]: _split(address)[1] for key, address in addresses.items()}
        self._config = self._config.model_copy(update=ports)
        self._supervising = asyncio.create_task(self._supervise(addresses.values()))
        return addresses

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the router, and to later starts of it."""
        self._messages |= message
        if self._child is not None:
            self._child.send(message)

    async def failure(self) -> Failure:
        """Returns the last error once no more restarts are tried. Only after `ready`."""
        assert self._supervising is not None
        return await asyncio.shield(self._supervising)

    async def stop(self, deadline: float) -> None:
        """Drains it until `deadline` (loop time), then kills it; it is not restarted."""
        self._stopping.set()
        if self._child is not None:
            await self._child.stop(deadline)
        if self._watching is not None:
            self._watching.cancel()
        if self._supervising is not None:
            await asyncio.gather(self._supervising, return_exceptions=True)
        for reserved in self._reserved.values():
            reserved.close()

    def kill(self) -> None:
        """Kills it at once; `stop` still has to be awaited."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _start(self) -> Child:
        child = await Child.start("router", self._command, self._config.model_dump_json(), keep_stdin=True)
        if self._messages:
            child.send(self._messages)
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.create_task(ChildWatch(child, _hung).run())
        return child

    async def _supervise(self, addresses: Collection[str]) -> Failure:
        """Restarts it whenever it ends. Returns its last error at a stop, or after too many restarts in a
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
            self._reserve(addresses)
            pause_s = 0.0 if in_a_row == 1 else min(FIRST_PAUSE_S * 2.0 ** (in_a_row - 2), LONGEST_PAUSE_S)
            notify(f"{_text(failure)}; restarting the router" + (f" in {pause_s:g} s" if pause_s else ""))
            if await self._stopped_within(pause_s):
                return failure
            began = loop.time()
            failure = await self._run_again()

    async def _run_again(self) -> Failure:
        """Runs one more process, from its start to its end."""
        try:
            self._child = await self._start()
        except OSError as error:
            return ChildError(f"router cannot be started: {error.strerror}")
        if self._stopping.is_set():  # `stop` has seen only the previous process
            self._child.kill()
        try:
            # No time limit: it is ready once it has found workers, which may be missing for long.
            await self._child.ready(float("inf"))
            notify("the router is ready again")
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

    def _reserve(self, addresses: Collection[str]) -> None:
        """Reserves its ports by sockets that are bound but never listen, so that the kernel does not assign
        them to another process. The router can still bind them."""
        for address in addresses:
            if address not in self._reserved and (reserved := _bound(*_split(address))) is not None:
                self._reserved[address] = reserved


def _hung(silent_s: float) -> None:
    notify(f"the router does not answer for {silent_s:g} s and is killed")


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _bound(host: str, port: int) -> socket.socket | None:
    """A bound socket, or None where the port cannot be bound; the router then reports the reason."""
    host = listening_host(host)
    reserved = socket.socket(listening_family(host))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port))
    except OSError:
        reserved.close()
        return None
    return reserved


def _text(failure: Failure) -> str:
    return failure.message if isinstance(failure, BatonError) else str(failure)
