"""Blocks on a GPU for `bench.transfer`, and what a copy engine alone does with as many bytes."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from baton.device.cuda_link_device import CudaLinkDevice
from bench.transfer_ends import GPU_BLOCK_BYTES
from kvtransfer.device_blocks import DeviceBlocks, DeviceSink
from kvtransfer.row_mover import warm


class GpuBlocks:
    """A pool of blocks on a GPU: where block n of a transfer lies was drawn beforehand."""

    def __init__(self, count: int, device: torch.device, block_bytes: int = GPU_BLOCK_BYTES) -> None:
        self._pool = _random_pool(count, device, block_bytes)
        self._places = random.Random(1).sample(range(count), count)
        self.blocks = DeviceBlocks(CudaLinkDevice(device), [self._pool])
        warm(self.blocks)

    def sink(self) -> DeviceSink:
        """What a receiver needs; the pool is emptied."""
        self._pool.zero_()
        torch.cuda.synchronize(self._pool.device)
        return DeviceSink(self.blocks, lambda transfer, group, ordinal: self._places[ordinal])

    def place(self, ordinal: int) -> int:
        """The number of a sender's nth block."""
        return self._places[ordinal]

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        return self._pool[block, offset : offset + length].cpu().numpy().data

    def unpin(self, group: int, block: int) -> None:
        """Nobody else uses them."""

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._pool[self._places[ordinal], offset : offset + len(data)].copy_(source)

    def equal(self, blocks: int) -> bool:
        """Whether the last transfer's blocks are those of a sender's pool; emptied again for the next."""
        sent = _random_pool(len(self._pool), self._pool.device, self._pool.shape[1])
        same = all(torch.equal(self._pool[place], sent[place]) for place in self._places[:blocks])
        self._pool.zero_()
        torch.cuda.synchronize(self._pool.device)
        return same


def gpu_blocks(count: int, device: str, block_bytes: int = GPU_BLOCK_BYTES) -> GpuBlocks:
    """`device`: cuda:N."""
    there = torch.device(device)
    torch.cuda.set_device(there)
    return GpuBlocks(count, there, block_bytes)


def _random_pool(count: int, device: torch.device, block_bytes: int) -> Tensor:
    """The same in every process."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (count, block_bytes // 4)
    numbers = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device, generator=generator)
    return numbers.view(torch.uint8)


class RawCopies:
    """One copy of so many bytes from one GPU to another, or within one, timed on the GPU."""

    def __init__(self, size: int, source: str, destination: str) -> None:
        self._from = torch.empty(size, dtype=torch.uint8, device=source)
        self._to = torch.empty(size, dtype=torch.uint8, device=destination)
        self._from.fill_(7)

    def seconds(self) -> float:
        torch.cuda.synchronize(self._from.device)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        self._to.copy_(self._from, non_blocking=True)
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3
