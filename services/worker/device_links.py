"""What a worker's links need of its GPU, where its KV blocks lie on one."""

from __future__ import annotations

from baton.device.cuda_link_device import CudaLinkDevice
from kvtransfer.device_blocks import DeviceBlocks
from kvtransfer.row_mover import warm
from services.common.logs import get_log
from services.worker.loaded_model import LoadedModel

log = get_log(__name__)


def device_blocks(model: LoadedModel, transport: str) -> DeviceBlocks | None:
    """For links within a host; None where blocks lie on the host, or travel through it."""
    if model.device.type != "cuda" or transport == "grpc":
        return None
    try:
        blocks = DeviceBlocks(CudaLinkDevice(model.device), model.cache.groups)
        warm(blocks)
        return blocks
    except (OSError, RuntimeError, AttributeError, ValueError) as error:
        log.warning("no_links_between_gpus", reason=str(error))
        return None
