"""TLS of an HTTP listener: each connection's handshake, with the certificate that the files have then.

A connection counts from its first byte on, and its handshake is limited in time. After the handshake the
protocol that uvicorn would have made of a plaintext connection takes it over.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.tls.files import TlsFiles
from baton.tls.material import Material
from services.router.http.connections import Connections, client_address

# For the peer's close_notify after the last byte.
_SHUTDOWN_S = 2.0


class ServerContexts:
    """The context for new connections: TLS 1.2 and 1.3, with client certificates where authorities of theirs
    are configured."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ssl.SSLError where the certificate cannot be used."""
        self._files = files
        self._made = self._make(files.current())

    def latest(self) -> ssl.SSLContext:
        """The same until the files change."""
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


class TlsHandshake(asyncio.Protocol):
    """A new connection until its handshake has ended; a `Connection` of `Connections`."""

    def __init__(
        self, contexts: ServerContexts, connections: Connections, make: Callable[[], asyncio.Protocol]
    ) -> None:
        """`make`: the protocol of a connection whose handshake has succeeded."""
        self._contexts = contexts
        self._connections = connections
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self.address = ""
        self.buffered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection and begins its handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.pause_reading()  # until the handshake reads
        loop = asyncio.get_running_loop()
        peer = transport.get_extra_info("peername")
        self.address = client_address(peer[:2] if peer else None)
        if not self._connections.admit(self, loop.time()):
            self._connections.refused["too many connections"] += 1
        self._task = loop.create_task(self._shake_hands(transport))

    def evict(self, message: str) -> None:
        """Closes the connection at once, because another one needs its descriptor."""
        self._connections.refused["evicted"] += 1
        if self._transport is not None:
            self._transport.abort()

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        early = _EarlyData()
        timeout_s = self._connections.limits.head_timeout_s
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                early,
                self._contexts.latest(),
                server_side=True,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:  # also ssl.SSLError, and the end of the connection or of the time
            self._connections.refused["tls handshake"] += 1
            transport.abort()
            return
        finally:
            self._connections.remove(self)
        if secured is not None:
            early.hand_over(secured, self._make())


class _EarlyData(asyncio.Protocol):
    """Keeps what arrives between the end of the handshake and the next turn of the event loop."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._ended = False
        self._lost: tuple[Exception | None] | None = None

    def data_received(self, data: bytes) -> None:
        self._data.append(data)

    def eof_received(self) -> bool:
        self._ended = True
        return True  # `hand_over` decides

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = (exc,)

    def hand_over(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        """Has `protocol` serve the connection."""
        if self._lost is not None:
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._data:
            protocol.data_received(data)
        if self._ended and not protocol.eof_received():
            transport.close()


def handshakes(
    contexts: ServerContexts, connections: Connections, protocol: Callable[..., asyncio.Protocol]
) -> Callable[..., asyncio.Protocol]:
    """A factory for uvicorn in place of `protocol`, which is made with the same arguments later."""

    def make(**arguments: Any) -> asyncio.Protocol:  # noqa: ANN401 (uvicorn's)
        return TlsHandshake(contexts, connections, lambda: protocol(**arguments))

    return make


def _load_pair(context: ssl.SSLContext, material: Material) -> None:
    """From memory, so that certificate and key are those that were validated together."""
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(material.chain.pem + b"\n" + material.key)
        context.load_cert_chain(Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)
