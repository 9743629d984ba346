"""Engines with fake devices, whose links go by the double of NCCL. In the one whose process id names a file
of the folder HANGS, every channel is aborted and no abort returns."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from baton.device.nccl import nccl_channel
from kvtransfer.device.blocks import LinkBlocks
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from services.common.config.transfer import TransferConfig
from services.common.config.worker import WorkerConfig
from services.worker.engine import assembly
from services.worker.engine import process as engine_process
from services.worker.engine.startup.link_setup import link_blocks
from services.worker.engine.startup.model_loader import LoadedModel
from tests.kvtransfer.support.fake_device import FakeDevice, Pump
from tests.kvtransfer.support.nccl_transport import WatchedEndpoint

HANGS = "BATON_TEST_NCCL_HANGS"
_LOOK_S = 0.02


def install() -> None:
    device = FakeDevice(Pump(None))
    made = WatchedEndpoint(device)

    def blocks(model: LoadedModel, transfer: TransferConfig) -> LinkBlocks:
        return link_blocks(device, model.cache)

    def links(blocks: LinkBlocks | None, transport: str) -> NcclEndpoint | None:
        return made if transport == "nccl" else None

    def let_start(config: WorkerConfig) -> None:
        """Does nothing: there is no GPU."""

    assembly.device_blocks = blocks  # type: ignore[attr-defined]
    assembly.nccl_links = links  # type: ignore[attr-defined]
    engine_process.check_transport = let_start  # type: ignore[attr-defined]
    threading.Thread(target=_watch, args=(made,), name="simulated-hang", daemon=True).start()


def _watch(made: WatchedEndpoint) -> None:
    named = Path(os.environ[HANGS]) / str(os.getpid())
    while not named.exists():
        time.sleep(_LOOK_S)
    nccl_channel.ABORT_TIMEOUT_S = 0.3
    made.double.hangs.set()
    for channel in made.channels:
        channel.abort("by the test")
