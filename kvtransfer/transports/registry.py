"""The transports there are, by the names that a configuration has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from baton.device.link_device import LinkDevice
from baton.errors import BatonError, ErrorKind
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.link.interfaces import Connector, Listener
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc import stream as grpc_stream
from kvtransfer.transports.grpc.connector import GrpcConnector
from kvtransfer.transports.grpc.listener import GrpcListener
from kvtransfer.transports.ipc import control as ipc_control
from kvtransfer.transports.ipc.byte_ring import STORES_IN_ORDER
from kvtransfer.transports.ipc.connector import IpcConnector
from kvtransfer.transports.ipc.listener import IpcListener
from kvtransfer.transports.nccl import endpoint as nccl_links
from kvtransfer.transports.nccl.connector import NcclConnector
from kvtransfer.transports.nccl.endpoint import NcclLinks
from kvtransfer.transports.nccl.receiver_wire import NcclListener

T = TypeVar("T")

IPC, NCCL, GRPC = ipc_control.TRANSPORT, nccl_links.TRANSPORT, grpc_stream.TRANSPORT

# What `auto` takes, the best first. NCCL goes between the two when it is known to hold (docs/decisions/0015).
AUTO: tuple[str, ...] = (IPC, GRPC)

_NEEDS = {
    IPC: "a processor that shows stores in their order",
    NCCL: "KV blocks on a GPU, and NCCL",
}


def ways_of(transport: str) -> tuple[str, ...]:
    """What a worker that is told `transport` takes, the best first: that alone, or with `auto` whatever of
    these it can have."""
    return AUTO if transport == "auto" else (transport,)


def connectors_of(
    transport: str,
    wake: Callable[[], None],
    blocks: DeviceBlocks | None = None,
    nccl: NcclLinks | None = None,
    auth: LinkAuth | None = None,
) -> tuple[Connector, ...]:
    """What a sender that is told to use `transport` has. `blocks`: where its blocks lie in a device's memory;
    `nccl`: what links by NCCL have in common; `auth`: of its cluster. `BatonError` INVALID where it cannot
    have them."""
    makers: dict[str, Callable[[], Connector]] = {GRPC: partial(GrpcConnector, wake, auth)}
    if STORES_IN_ORDER:
        makers[IPC] = partial(IpcConnector, wake, blocks, auth)
    if nccl is not None and blocks is not None:
        makers[NCCL] = partial(NcclConnector, wake, nccl, blocks, auth)
    return tuple(make() for make in _of(transport, makers))


def listeners_of(
    transport: str,
    host: str,
    port: int,
    piece_bytes: int,
    peer_timeout_s: float,
    max_links: int,
    wake: Callable[[], None],
    device: LinkDevice | None = None,
    nccl: NcclLinks | None = None,
    auth: LinkAuth | None = None,
    frames_port: int = 0,
) -> list[Listener]:
    """Starts those of `transport`, the best first. `device`: where blocks are to go; `nccl` and `auth`: as
    above. Of several at once grpc has the port; `frames_port` is nccl's second one.

    `BatonError` INVALID where it cannot bind, or this process cannot have them.
    """
    bounds: dict[str, Any] = {
        "peer_timeout_s": peer_timeout_s,
        "max_links": max_links,
        "wake": wake,
        "auth": auth,
    }
    makers: dict[str, Callable[[], Listener]] = {
        GRPC: partial(GrpcListener, host, port, piece_bytes=piece_bytes, **bounds)
    }
    if STORES_IN_ORDER:
        makers[IPC] = partial(IpcListener, device=device, **bounds)
    if nccl is not None:
        own_port = port if transport == NCCL else 0
        makers[NCCL] = partial(NcclListener, host, own_port, links=nccl, frames_port=frames_port, **bounds)
    started: list[Listener] = []
    try:
        for make in _of(transport, makers):
            started.append(make())
    except BatonError:
        for listener in started:
            listener.close()
        raise
    return started


def _of(transport: str, makers: Mapping[str, T]) -> Iterator[T]:
    """Those of its ways that this process has."""
    if transport != "auto" and transport not in makers:
        raise BatonError(ErrorKind.INVALID, f"transport {transport} needs {_NEEDS[transport]}")
    return (makers[way] for way in ways_of(transport) if way in makers)
