"""TLS of an HTTP listener: each connection's handshake, with the certificate that the files have then.

A connection counts from its acceptance on, and its handshake is limited in time. Each is accepted by itself
instead of by `loop.create_server`, which has one context for all and does not report failed handshakes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from baton.tls.files import TlsFiles
from baton.tls.material import Material
from services.common.observability.logs import get_log
from services.router.http.connections import Connections, client_address

# For the peer's close_notify after the last byte.
_SHUTDOWN_S = 2.0
# After a failed accept; without descriptors the next would fail at once.
_ACCEPT_PAUSE_S = 0.5

_log = get_log("router")


class ServerContexts:
    """The context for new connections: TLS 1.2 and 1.3, with client certificates where authorities of theirs
    are configured."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ssl.SSLError where the certificate cannot be used."""
        self._files = files
        self._made = self._make(files.current())

    def latest(self) -> ssl.SSLContext:
        """The context for a new connection: the same one until the files change."""
        material = self._files.current()
        if material != self._made[0]:
            self._made = self._make(material)
        return self._made[1]

    @staticmethod
    def _make(material: Material) -> tuple[Material, ssl.SSLContext]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        _load_pair(context, material)
        if material.authorities:
            context.load_verify_locations(cadata=material.authorities.decode())
            context.verify_mode = ssl.CERT_REQUIRED
        return material, context


class TlsListener:
    """Accepts connections and has protocols serve those whose handshake succeeds."""

    def __init__(self, contexts: ServerContexts, connections: Connections) -> None:
        self._contexts = contexts
        self._connections = connections
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    def start(self, listening: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        """Begins to accept. Owns the socket, which listens already; `make`: the protocol of a connection."""
        listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(listening, make))

    async def stop(self) -> None:
        """Stops accepting and ends unfinished handshakes."""
        tasks = list(self._handshakes)
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listening: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    accepted, peer = await loop.sock_accept(listening)
                except OSError as error:  # out of descriptors, or the client has gone
                    _log.warning("accept_failed", reason=error.strerror)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                handshake = _Handshake(client_address(peer[:2]))
                handshake.task = asyncio.create_task(self._shake_hands(handshake, accepted, make))
                self._handshakes.add(handshake.task)
                handshake.task.add_done_callback(self._handshakes.discard)
                if not self._connections.admit(handshake, loop.time()):
                    self._connections.refused["too many connections"] += 1

    async def _shake_hands(
        self, handshake: _Handshake, accepted: socket.socket, make: Callable[[], asyncio.Protocol]
    ) -> None:
        def counted_once() -> asyncio.Protocol:
            protocol = make()
            begin = protocol.connection_made

            def connection_made(transport: asyncio.BaseTransport) -> None:
                self._connections.remove(handshake)  # the protocol counts the connection from now on
                begin(transport)

            protocol.connection_made = connection_made  # type: ignore[method-assign]
            return protocol

        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                counted_once,
                accepted,
                ssl=self._contexts.latest(),
                ssl_handshake_timeout=self._connections.limits.head_timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:  # ssl.SSLError, the end of the connection, or of the time
            self._connections.refused["tls handshake"] += 1
        except asyncio.CancelledError:
            self._connections.refused["evicted"] += handshake.evicted
            raise
        finally:
            self._connections.remove(handshake)


class _Handshake:
    """A connection until its handshake has ended, as `Connections` counts it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.buffered = 0
        self.evicted = False
        self.task: asyncio.Task[None] | None = None

    def evict(self, message: str) -> None:
        """Closes the connection, because another one needs its descriptor."""
        self.evicted = True
        if self.task is not None:
            self.task.cancel()


def _load_pair(context: ssl.SSLContext, material: Material) -> None:
    """Loads certificate and key from memory, so that they are those that were validated together."""
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(material.chain.pem + b"\n" + material.key)
        context.load_cert_chain(Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)
