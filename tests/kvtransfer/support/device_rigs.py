"""Two ends' devices in one process, and arrays that a test writes and reads where the devices do."""

from __future__ import annotations

import ctypes
import mmap
from itertools import product
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.device.streams.link_device import LinkDevice

if TYPE_CHECKING:  # a peer without devices starts sooner without torch
    from torch import Tensor


class DeviceRig(Protocol):
    @property
    def sender(self) -> LinkDevice: ...

    @property
    def receiver(self) -> LinkDevice: ...

    def array(self, shape: tuple[int, int], dtype: type[np.uint8]) -> NDArray[np.uint8]:
        """Memory of which `tensor` gives the devices' view."""

    def tensor(self, array: NDArray[np.uint8], device: LinkDevice) -> Tensor: ...

    def flip(self, address: int, bit: int) -> None:
        """One bit of device memory."""

    def advance(self) -> float:
        """Time goes on; how long one may wait for more, in seconds."""


class FakeRig:
    """Devices that do enqueued work some time later, by seed; at once without one."""

    def __init__(self, seed: int | None) -> None:
        from tests.kvtransfer.support.fake_device import FakeDevice, Pump

        self.pump = Pump(seed)
        self.sender: LinkDevice = FakeDevice(self.pump, "fake:0", ("fake:1",))
        self.receiver: LinkDevice = FakeDevice(self.pump, "fake:1")

    def array(self, shape: tuple[int, int], dtype: type[np.uint8]) -> NDArray[np.uint8]:
        return np.zeros(shape, dtype)

    def tensor(self, array: NDArray[np.uint8], device: LinkDevice) -> Tensor:
        import torch

        return torch.from_numpy(array)

    def flip(self, address: int, bit: int) -> None:
        ctypes.c_uint8.from_address(address).value ^= 1 << bit

    def advance(self) -> float:
        self.pump.some()
        return 0.001 if self.pump.idle() else 0.0


class CudaRig:
    """One GPU or two; arrays lie in the host's memory, registered, where kernels reach them."""

    def __init__(self, sender: int = 0, receiver: int = 0) -> None:
        import torch

        from baton.device.streams.cuda_link_device import CudaLinkDevice

        self.sender: LinkDevice = CudaLinkDevice(torch.device("cuda", sender))
        self.receiver: LinkDevice = CudaLinkDevice(torch.device("cuda", receiver))
        for device in (self.sender, self.receiver):
            self._warm(device)

    def array(self, shape: tuple[int, int], dtype: type[np.uint8]) -> NDArray[np.uint8]:
        size = shape[0] * shape[1]
        pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        return np.frombuffer(pages, np.uint8, size).reshape(shape)

    def tensor(self, array: NDArray[np.uint8], device: LinkDevice) -> Tensor:
        from baton.device.cuda_runtime import cuda_runtime
        from baton.device.streams.cuda_link_device import tensor_at

        array[:] = array  # its pages are there
        runtime = cuda_runtime()
        runtime.set_device(device.tensors_on.index)
        address = runtime.register(int(array.ctypes.data), array.nbytes)
        # Registered until the process ends: its pages must not go before.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
        return tensor_at(address, array.nbytes, device.tensors_on).view(array.shape)

    def flip(self, address: int, bit: int) -> None:
        from baton.device.streams.cuda_link_device import tensor_at

        tensor_at(address, 1, self.receiver.tensors_on).bitwise_xor_(1 << bit)

    def advance(self) -> float:
        return 0.0002

    @staticmethod
    def _warm(device: LinkDevice) -> None:
        """Warms a device up, as a worker does before its first link, whose opening has a deadline."""
        from kvtransfer.device.kernels.move_runs import prepared

        for aligned, stores, head in product((False, True), repeat=3):
            prepared(device.tensors_on, aligned, stores, head)


def rig_of(transport: str, *, at_once: bool = False) -> DeviceRig | None:
    """The device rig that a test's name of a transport has behind the first dash: `ipc-fake`, `ipc-cuda` (one
    GPU), `ipc-peer` (from the first GPU to the second). `at_once`: for one end in a process of its own."""
    match transport.partition("-")[2]:
        case "fake":
            return FakeRig(None if at_once else 3)
        case "cuda":
            return CudaRig()
        case "peer":
            return CudaRig(0, 1)
    return None
