"""Sets up the links of a worker whose KV blocks are in the memory of GPUs."""

from __future__ import annotations

from baton.base.errors import BatonError, ErrorKind
from baton.device.nccl.nccl_library import Nccl
from baton.device.streams.cuda_link_device import CudaLinkDevice
from baton.device.streams.link_device import LinkDevice
from baton.engine.memory.kv_cache import BlockMemory
from baton.engine.memory.split_cache import SplitKVCache
from kvtransfer.device.blocks import DeviceBlocks, DividedBlocks, LinkBlocks
from kvtransfer.device.movers import warm
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


def device_blocks(model: LoadedModel, transfer: TransferConfig) -> LinkBlocks | None:
    """The KV blocks for links between GPUs; None where they are in host memory or are sent through it."""
    if model.device.type != "cuda" or transfer.through_host:
        return None
    try:
        blocks = link_blocks(CudaLinkDevice(model.device, one_of_several=len(model.ranks) > 1), model.cache)
        warm(blocks)
        return blocks
    except (OSError, RuntimeError, AttributeError, ValueError) as error:
        log.warning("gpu_links_unavailable", reason=str(error))
        return None


def link_blocks(device: LinkDevice, cache: BlockMemory) -> LinkBlocks:
    """A worker's blocks as its links use them. `device`: the first of its devices. ValueError for blocks that
    are not whole words."""
    if isinstance(cache, SplitKVCache):
        return DividedBlocks(device, cache.heads)
    return DeviceBlocks(device, cache.ranks[0].storage)


def nccl_links(blocks: LinkBlocks | None, transport: str) -> NcclEndpoint | None:
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
        device = blocks.device
        return NcclEndpoint(device, CudaNccl(device.tensors_on, device.launching))
    except RuntimeError as error:
        if transport == NCCL:
            raise _no_nccl(str(error)) from error
        log.warning("nccl_unavailable", reason=str(error))
        return None


def _no_nccl(why: str) -> BatonError:
    return BatonError(ErrorKind.INVALID, f"transport nccl: {why}")
