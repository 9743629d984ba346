"""nccl links of a process whose blocks are on a GPU."""

from __future__ import annotations

from baton.device.cuda_nccl import CudaNccl
from baton.device.link_device import LinkDevice
from kvtransfer.transports.nccl.endpoint import NcclLinks

CONNECT_S = 5.0


def nccl_links(device: LinkDevice) -> NcclLinks:
    """All of them have this in common. RuntimeError where there is no NCCL."""
    return NcclLinks(device, CudaNccl(device.tensors_on), CONNECT_S)
