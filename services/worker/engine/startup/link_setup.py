"""What a worker's links need of its GPU, where its KV blocks lie on one."""

from __future__ import annotations

from baton.device.cuda_link_device import CudaLinkDevice
from baton.device.nccl import Nccl
from baton.errors import BatonError, ErrorKind
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.device.mover import warm
from kvtransfer.protocol.addresses import NCCL
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from kvtransfer.transports.registry import transports_of
from services.common.config import TransferConfig, WorkerConfig
from services.common.logs import get_log
from services.worker.engine.startup.model_loader import LoadedModel, device_of

log = get_log(__name__)


def check_transport(config: WorkerConfig) -> None:
    """Before minutes of loading: `BatonError` INVALID where this worker is told to use NCCL and cannot."""
    if config.transfer.transport != NCCL:
        return
    if device_of(config.engine).type != "cuda":
        raise _no_nccl("it is between GPUs, and this worker's KV blocks lie on the host")
    try:
        Nccl()
    except RuntimeError as error:
        raise _no_nccl(str(error)) from error


def device_blocks(model: LoadedModel, transfer: TransferConfig) -> DeviceBlocks | None:
    """For links from GPU to GPU; None where blocks lie on the host, or travel through it."""
    if model.device.type != "cuda" or transfer.through_host:
        return None
    try:
        blocks = DeviceBlocks(CudaLinkDevice(model.device), model.cache.groups)
        warm(blocks)
        return blocks
    except (OSError, RuntimeError, AttributeError, ValueError) as error:
        log.warning("no_links_between_gpus", reason=str(error))
        return None


def nccl_links(blocks: DeviceBlocks | None, transport: str) -> NcclEndpoint | None:
    """What links by NCCL have in common; None where there are none, or `transport` does without them.
    `BatonError` INVALID where it does not."""
    if NCCL not in transports_of(transport):
        return None
    if blocks is None:
        if transport == NCCL:
            raise _no_nccl("this worker's KV blocks cannot be moved where they lie")
        return None
    from baton.device.cuda_nccl import CudaNccl

    try:
        return NcclEndpoint(blocks.device, CudaNccl(blocks.device.tensors_on))
    except RuntimeError as error:
        if transport == NCCL:
            raise _no_nccl(str(error)) from error
        log.warning("no_links_by_nccl", reason=str(error))
        return None


def _no_nccl(why: str) -> BatonError:
    return BatonError(ErrorKind.INVALID, f"transport nccl: {why}")
