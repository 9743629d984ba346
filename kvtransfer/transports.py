"""The transports there are, by the names that a configuration has for them."""

from __future__ import annotations

from collections.abc import Callable

from baton.device.link_device import LinkDevice
from kvtransfer.byte_ring import STORES_IN_ORDER
from kvtransfer.device_blocks import DeviceBlocks
from kvtransfer.grpc_connector import GrpcConnector
from kvtransfer.grpc_listener import GrpcListener
from kvtransfer.ipc_connector import IpcConnector
from kvtransfer.ipc_listener import IpcListener
from kvtransfer.transport import Connector, Listener


def connectors_of(
    transport: str, wake: Callable[[], None], blocks: DeviceBlocks | None = None
) -> tuple[Connector, ...]:
    """What a sender that is told to use `transport` (grpc, ipc, or auto: all) has; `blocks`: where its blocks
    lie in a device's memory."""
    connectors: tuple[Connector, ...] = (IpcConnector(wake, blocks), GrpcConnector(wake))
    return tuple(connector for connector in connectors if transport in ("auto", connector.transport))


def listeners_of(
    transport: str,
    host: str,
    port: int,
    piece_bytes: int,
    peer_timeout_s: float,
    max_links: int,
    wake: Callable[[], None],
    device: LinkDevice | None = None,
) -> list[Listener]:
    """Starts those of `transport` (grpc, ipc, or auto: what this machine has), the fastest first; `device`:
    where blocks are to go.

    `BatonError` INVALID where it cannot bind, or this machine has no such transport.
    """
    listeners: list[Listener] = []
    if transport in ("grpc", "auto"):
        over_network = GrpcListener(
            host, port, piece_bytes=piece_bytes, peer_timeout_s=peer_timeout_s, max_links=max_links, wake=wake
        )
        listeners.append(over_network)
    if transport == "ipc" or (transport == "auto" and STORES_IN_ORDER):
        within_host = IpcListener(
            peer_timeout_s=peer_timeout_s, max_links=max_links, wake=wake, device=device
        )
        listeners.insert(0, within_host)
    return listeners
