"""Memory of links by NCCL that lies on a device, and the lines that reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from baton.device.link_device import LinkDevice, Memory
from baton.device.nccl_line import NcclLine


class Lines(Protocol):
    """`baton.device.nccl_on_cuda.CudaNccl`, or a double of it."""

    def unique_id(self) -> bytes: ...

    def line(self, unique_id: bytes, rank: int, wake: Callable[[], None], connect_s: float) -> NcclLine: ...


class DevicePlace:
    """Memory of a device's own."""

    def __init__(self, memory: Memory) -> None:
        self.window = memory
        self._on = memory.tensor.device

    @property
    def address(self) -> int:
        return self.window.address

    def write(self, at: int, payload: bytes | memoryview) -> None:
        words = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self.window.tensor[at : at + len(words)].copy_(words)

    def free(self) -> None:
        if self._on.type == "cuda":
            torch.cuda.set_device(self._on)  # of a thread that has none yet, and would be given the first
        self.window.free()


class DeviceLibrary:
    """What `NcclLinks` takes where blocks are on a device."""

    def __init__(self, device: LinkDevice, lines: Lines) -> None:
        self.device: LinkDevice | None = device
        self._device = device
        self._lines = lines

    def unique_id(self) -> bytes:
        return self._lines.unique_id()

    def line(self, unique_id: bytes, rank: int, wake: Callable[[], None], connect_s: float) -> NcclLine:
        return self._lines.line(unique_id, rank, wake, connect_s)

    def place(self, size: int) -> DevicePlace:
        return DevicePlace(self._device.allocate(size))
