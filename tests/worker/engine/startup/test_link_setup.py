"""Blocks of one GPU and of several, as their links get them."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from baton.engine.memory.kv_cache import BlockMemory, KVCache
from baton.engine.memory.split_cache import SplitKVCache
from baton.model_spec.layout import CacheGroup, Layout, key_value_planes
from kvtransfer.device.blocks import DeviceBlocks, DividedBlocks, LinkBlocks
from services.common.config.transfer import TransferConfig
from services.worker.engine.startup import link_setup
from services.worker.engine.startup.model_loader import LoadedModel
from tests.kvtransfer.support.fake_device import FakeDevice, Pump


class FakeModel:
    """A model on GPUs, whose blocks are on the host."""

    device = torch.device("cuda", 0)

    def __init__(self, ranks: int) -> None:
        whole, part = (
            Layout((CacheGroup((0,), key_value_planes("bfloat16", heads, 8), 4),))
            for heads in (2, 2 // ranks)
        )
        caches = [KVCache(part, 3, "cpu") for _ in range(ranks)]
        self.ranks = (None,) * ranks
        self.cache: BlockMemory = caches[0] if ranks == 1 else SplitKVCache(whole, caches)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns for each device that was made if it is one of several."""
    made: list[bool] = []

    def device(place: torch.device, *, one_of_several: bool) -> FakeDevice:
        assert place == FakeModel.device
        made.append(one_of_several)
        return FakeDevice(Pump(None))

    monkeypatch.setattr(link_setup, "CudaLinkDevice", device)
    monkeypatch.setattr(link_setup, "warm", lambda blocks: None)
    return made


def blocks_of(ranks: int, transfer: TransferConfig) -> LinkBlocks | None:
    return link_setup.device_blocks(cast(LoadedModel, FakeModel(ranks)), transfer)


def test_links_of_several_gpus_move_whole_blocks(several: list[bool]) -> None:
    one, two = (blocks_of(ranks, TransferConfig()) for ranks in (1, 2))
    assert isinstance(one, DeviceBlocks)
    assert isinstance(two, DividedBlocks)
    assert one.block_bytes == two.block_bytes == (2 * 2 * 4 * 8 * 2,)
    assert several == [False, True]


def test_blocks_that_go_through_the_host_need_no_device(several: list[bool]) -> None:
    for transfer in (TransferConfig(transport="grpc"), TransferConfig(kv_wire="fp8")):
        assert blocks_of(2, transfer) is None
    assert several == []


def test_links_go_through_the_host_where_kernels_cannot_be_launched(
    several: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(blocks: LinkBlocks) -> None:
        raise RuntimeError("no direct launch")

    monkeypatch.setattr(link_setup, "warm", refuse)
    assert blocks_of(2, TransferConfig()) is None
    assert several == [True]
