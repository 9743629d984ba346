"""Lines of NCCL on a GPU of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch

from baton.device.cuda_runtime import cuda_runtime
from baton.device.nccl import Communicator, Nccl
from baton.device.nccl_line import Moment, NcclLine

# Multiprocessors that a line's kernels take at most: between two H200s 339 GB/s, with half as many 262, with
# twice as many 354 (docs/decisions/0015).
MAX_CTAS = 16


class _LineMoment(Protocol):
    """A moment of a line of `CudaLinkDevice`'s."""

    event: int


class _Moment:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def ended(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class _OwnStream:
    """Not one of torch's, which others have too: a kernel that waits on it keeps nobody else waiting."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self.handle = cuda_runtime().new_stream()
        self._stream = torch.cuda.ExternalStream(self.handle, device=device)  # type: ignore[no-untyped-call]

    def after(self, moment: Moment) -> None:
        cuda_runtime().wait(self.handle, cast(_LineMoment, moment).event)

    def moment(self) -> Moment:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _Moment(event)

    def close(self) -> None:
        cuda_runtime().end_stream(self.handle)


class CudaNccl:
    """RuntimeError where there is no NCCL."""

    def __init__(self, device: torch.device, max_ctas: int = MAX_CTAS) -> None:
        self._device = device
        self._max_ctas = max_ctas
        self._nccl = Nccl()

    def unique_id(self) -> bytes:
        return self._nccl.unique_id()

    def line(self, unique_id: bytes, rank: int, wake: Callable[[], None], connect_s: float) -> NcclLine:
        def begin() -> Communicator:
            torch.cuda.set_device(self._device)  # the line's thread's from now on
            return self._nccl.communicator(unique_id, rank, 2, max_ctas=self._max_ctas)

        return NcclLine(begin, _OwnStream(self._device), 1 - rank, wake, connect_s)
