"""The transports there are, by the names that a configuration uses for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.link_device import LinkDevice
from kvtransfer.device.blocks import LinkBlocks
from kvtransfer.link.interfaces import Connector, Listener
from kvtransfer.link.settings import ListenerSettings, WindowSettings
from kvtransfer.protocol.addresses import GRPC, IPC, NCCL, Endpoint
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.connector import GrpcConnector
from kvtransfer.transports.grpc.listener import GrpcListener
from kvtransfer.transports.grpc.tls import LinkTls
from kvtransfer.transports.ipc.byte_ring import STORES_IN_ORDER
from kvtransfer.transports.ipc.connector import IpcConnector
from kvtransfer.transports.ipc.control import address_of
from kvtransfer.transports.ipc.listener import IpcListener
from kvtransfer.transports.listen_config import ListenConfig
from kvtransfer.transports.nccl.connector import NcclConnector
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from kvtransfer.transports.nccl.listener import NcclListener

T = TypeVar("T")

# What `auto` uses, the best first. NCCL is to go between the two once it is proven (docs/decisions/0015).
AUTO: tuple[str, ...] = (IPC, GRPC)

_NEEDS = {
    IPC: "a processor with ordered stores",
    NCCL: "KV blocks on a GPU, and NCCL",
}


def transports_of(transport: str) -> tuple[str, ...]:
    """The transports that the setting `transport` stands for, the best first: itself, or for `auto` all that
    this process can use of `AUTO`."""
    return AUTO if transport == "auto" else (transport,)


def make_connectors(
    transport: str,
    wake: Callable[[], None],
    blocks: LinkBlocks | None = None,
    nccl: NcclEndpoint | None = None,
    auth: LinkAuth | None = None,
    tls: LinkTls | None = None,
) -> tuple[Connector, ...]:
    """A sender's connectors for the setting `transport`.

    `blocks`: where its blocks lie in device memory; `nccl`: this process's NCCL; `auth`: of its cluster;
    `tls`: of connections over gRPC. BatonError(INVALID) where this process cannot use the transport.
    """
    makers: dict[str, Callable[[], Connector]] = {GRPC: partial(GrpcConnector, wake, auth, tls)}
    if STORES_IN_ORDER:
        makers[IPC] = partial(IpcConnector, wake, blocks, auth)
    if nccl is not None and blocks is not None:
        makers[NCCL] = partial(NcclConnector, wake, nccl, blocks, auth, tls)
    return tuple(make() for make in _usable(transport, makers))


def reach_of(connectors: Sequence[Connector]) -> tuple[str, ...]:
    """The reach of each connector, as that of the endpoints to which it opens links (`Endpoint.reach`)."""
    transports = (connector.transport for connector in connectors)
    return tuple(Endpoint(one, address_of("") if one == IPC else "").reach for one in transports)


def start_listeners(
    config: ListenConfig,
    window: WindowSettings,
    peer_timeout_s: float,
    wake: Callable[[], None],
    device: LinkDevice | None = None,
) -> list[Listener]:
    """Starts a receiver's listeners for `config.transport`, the best first. `device`: where blocks are to go.

    BatonError(INVALID) where one cannot bind, or this process cannot use the transport.
    """
    host, port = config.host, config.port
    settings = ListenerSettings(wake, peer_timeout_s, window.max_links, config.auth or LinkAuth())
    bound: dict[str, Any] = {"listen_host": config.listen_host, "tls": config.tls}
    makers: dict[str, Callable[[], Listener]] = {
        GRPC: partial(GrpcListener, host, port, settings, piece_bytes=window.piece_bytes, **bound)
    }
    if STORES_IN_ORDER:
        makers[IPC] = partial(IpcListener, settings, device)
    if (nccl := config.nccl) is not None:
        own_port, frames = port if config.transport == NCCL else 0, config.frames_port
        makers[NCCL] = partial(NcclListener, host, own_port, settings, nccl, frames_port=frames, **bound)
    started: list[Listener] = []
    try:
        for make in _usable(config.transport, makers):
            started.append(make())
    except BatonError:
        for listener in started:
            listener.close()
        raise
    return started


def _usable(transport: str, makers: Mapping[str, T]) -> Iterator[T]:
    """The makers of the setting's transports that this process can use."""
    if transport != "auto" and transport not in makers:
        raise BatonError(ErrorKind.INVALID, f"transport {transport} needs {_NEEDS[transport]}")
    return (makers[name] for name in transports_of(transport) if name in makers)
