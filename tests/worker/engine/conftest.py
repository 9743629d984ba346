from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.device.nccl import nccl_channel
from kvtransfer.device.blocks import LinkBlocks
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from services.common.config.transfer import TransferConfig
from services.worker.engine.startup.link_setup import link_blocks
from services.worker.engine.startup.model_loader import LoadedModel
from tests.kvtransfer.support.fake_device import FakeDevice, Pump
from tests.kvtransfer.support.nccl_transport import WatchedEndpoint
from tests.worker.engine.stepped_engine import SteppedEngine


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[SteppedEngine]:
    made = SteppedEngine(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedEngine]:
    """The same model in one engine, without a cache."""
    made = SteppedEngine(tmp_path_factory.mktemp("truth"), prefix_cache=False)
    yield made
    made.close()


@pytest.fixture
def quantised(tmp_path: Path) -> Iterator[SteppedEngine]:
    """One engine with a cache in fp8; to be built before any fake devices are."""
    made = SteppedEngine(tmp_path, prefix_cache=False, kv_dtype="fp8")
    yield made
    made.close()


@pytest.fixture
def devices() -> list[FakeDevice]:
    """The fake devices of the engines, in the order of their starts."""
    return []


@pytest.fixture
def pump(monkeypatch: pytest.MonkeyPatch, devices: list[FakeDevice]) -> Pump:
    """The queue of the fake devices; each engine that is built from here on has one, which links move its
    blocks by."""
    pump, names = Pump(8), itertools.count()

    def device_blocks(model: LoadedModel, transfer: TransferConfig) -> LinkBlocks:
        devices.append(FakeDevice(pump, f"fake:{next(names)}", ("fake:0", "fake:1")))
        return link_blocks(devices[-1], model.cache)

    monkeypatch.setattr("services.worker.engine.assembly.device_blocks", device_blocks)
    return pump


@pytest.fixture
def nccl_doubles(monkeypatch: pytest.MonkeyPatch) -> list[WatchedEndpoint]:
    """The NCCL links of the engines that are built from here on, in the order of their starts; each has a
    fake device."""
    made: list[WatchedEndpoint] = []
    pump, names = Pump(None), itertools.count()

    def device(model: LoadedModel, transfer: TransferConfig) -> LinkBlocks:
        return link_blocks(FakeDevice(pump, f"fake:{next(names)}"), model.cache)

    def links(blocks: LinkBlocks | None, transport: str) -> NcclEndpoint:
        assert blocks is not None
        made.append(WatchedEndpoint(blocks.device))
        return made[-1]

    monkeypatch.setattr("services.worker.engine.assembly.device_blocks", device)
    monkeypatch.setattr("services.worker.engine.assembly.nccl_links", links)
    monkeypatch.setattr(nccl_channel, "ABORT_TIMEOUT_S", 0.1)
    return made
