"""A GPU as the exchange uses it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.device.cuda_source import CudaFunction, cached_source
from baton.device.host_memory import HostMemory
from baton.device.peer_memory import plain_bytes
from baton.device.shared_memory import SharedMemory
from baton.engine.parallel.exchange_layout import Argument
from baton.engine.parallel.exchange_source import Constants


class CudaRank:
    """A `RankDevice`. It launches on torch's current stream of its device, which is to be the one stream of
    that device for all that communicates.

    The first launch of a kernel compiles and loads it, which waits for the device: each is launched first in
    `Exchange.solo`.
    """

    threads: int | None = None

    def __init__(self, index: int) -> None:
        self._index = index
        major, minor = torch.cuda.get_device_capability(index)
        self._architecture = f"sm_{major}{minor}"
        self._functions: dict[tuple[Constants, str], CudaFunction] = {}
        self._host: list[HostMemory] = []

    def allocate(self, size: int) -> Tensor:
        return plain_bytes(self._index, size)

    def map_host(self, memory: SharedMemory) -> int:
        # Registered for all devices, by the address that it has here.
        self._host.append(HostMemory(memory, torch.device("cuda", self._index)))
        return int(memory.bytes.ctypes.data)

    def launch(
        self, constants: Constants, kernel: str, blocks: int, threads: int, arguments: Sequence[Argument]
    ) -> None:
        with torch.cuda.device(self._index):
            function = self._functions.get((constants, kernel))
            if function is None:
                code = cached_source(constants.source, self._architecture)
                function = self._functions[constants, kernel] = CudaFunction(code, kernel, 0)
            function.launch(blocks, threads, arguments)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)
