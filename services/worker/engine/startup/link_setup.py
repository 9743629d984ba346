"""Sets up the links of a worker whose KV blocks are in a GPU's memory."""

from __future__ import annotations

from baton.base.errors import BatonError, ErrorKind
from baton.device.nccl.nccl_library import Nccl
from baton.device.streams.cuda_link_device import CudaLinkDevice
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.device.mover import warm
from kvtransfer.protocol.addresses import NCCL
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from kvtransfer.transports.registry import transports_of
from services.common.config.transfer import TransferConfig
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log
from services.worker.engine.startup.model_loader import LoadedModel, device_of

log = get_log(__name__)


def check_transport(config: WorkerConfig) -> None:
    """Raises BatonError(INVALID) where the configuration demands NCCL and it cannot be used; called before
    the model is loaded, which takes minutes."""
    if config.transfer.transport != NCCL:
        return
    if device_of(config.engine).type != "cuda":
        raise _no_nccl("it connects GPUs, and this worker's KV blocks are in host memory")
    try:
        Nccl()
    except RuntimeError as error:
        raise _no_nccl(str(error)) from error


def device_blocks(model: LoadedModel, transfer: TransferConfig) -> DeviceBlocks | None:
    """The KV blocks for links between GPUs; None where they are in host memory, are sent through it, or are
    divided among several GPUs."""
    several = len(model.ranks) > 1  # each of which has its heads of a block
    if model.device.type != "cuda" or transfer.through_host or several:
        return None
    try:
        blocks = DeviceBlocks(CudaLinkDevice(model.device), model.cache.ranks[0].storage)
        warm(blocks)
        return blocks
    except (OSError, RuntimeError, AttributeError, ValueError) as error:
        log.warning("gpu_links_unavailable", reason=str(error))
        return None


def nccl_links(blocks: DeviceBlocks | None, transport: str) -> NcclEndpoint | None:
    """Creates the part that this process's NCCL links share; None if NCCL cannot be used or `transport`
    excludes it. Raises BatonError(INVALID) if `transport` demands it and it cannot be used."""
    if NCCL not in transports_of(transport):
        return None
    if blocks is None:
        if transport == NCCL:
            raise _no_nccl("this worker's KV blocks cannot be moved between GPUs")
        return None
    from baton.device.nccl.cuda_nccl import CudaNccl

    try:
        return NcclEndpoint(blocks.device, CudaNccl(blocks.device.tensors_on))
    except RuntimeError as error:
        if transport == NCCL:
            raise _no_nccl(str(error)) from error
        log.warning("nccl_unavailable", reason=str(error))
        return None


def _no_nccl(why: str) -> BatonError:
    return BatonError(ErrorKind.INVALID, f"transport nccl: {why}")
