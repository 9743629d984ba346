"""nccl links of a process whose blocks are on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from baton.device.link_device import LinkDevice
from baton.device.nccl_on_cuda import CudaNccl
from kvtransfer.device_blocks import DeviceBlocks
from kvtransfer.nccl_connector import NcclConnector
from kvtransfer.nccl_device import DeviceLibrary
from kvtransfer.nccl_links import NcclLinks
from kvtransfer.nccl_receiver import NcclListener

# So long until both ends have met, or the link goes over another way.
CONNECT_S = 5.0


def nccl_connector(wake: Callable[[], None], blocks: DeviceBlocks) -> NcclConnector:
    """RuntimeError where there is no NCCL."""
    return NcclConnector(wake, _links(blocks.device), blocks)


def nccl_listener(
    host: str,
    port: int,
    *,
    peer_timeout_s: float,
    max_links: int,
    wake: Callable[[], None],
    device: LinkDevice,
) -> NcclListener:
    """RuntimeError where there is no NCCL, `BatonError` INVALID where it cannot bind."""
    return NcclListener(
        host, port, peer_timeout_s=peer_timeout_s, max_links=max_links, wake=wake, links=_links(device)
    )


def _links(device: LinkDevice) -> NcclLinks:
    return NcclLinks(DeviceLibrary(device, CudaNccl(device.tensors_on)), CONNECT_S)
