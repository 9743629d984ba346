"""Lines of NCCL on a GPU of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, cast

import torch

from baton.device.cuda_runtime import CudaRuntime, cuda_runtime
from baton.device.nccl import Communicator, Nccl, NcclError, Result
from baton.device.nccl_line import Moment, NcclLine, Stream

# Multiprocessors that a line's kernels may take: of fewer NCCL 2.28 gives pieces of up to 128 MiB half only,
# and between two H200s 16 move 340 GB/s, 8 of them 245 (docs/decisions/0015).
MAX_CTAS = 32
_WORD_BYTES = 64
_LOOK_S = 0.001


class _Event(Protocol):
    """A moment of a line of `CudaLinkDevice`'s, or of ours."""

    event: int


class _Moment:
    """Its event is another's when nobody asks any more."""

    def __init__(self, event: int, runtime: CudaRuntime, free: list[int]) -> None:
        self.event = event
        self._runtime = runtime
        self._free = free

    def ended(self) -> bool:
        return self._runtime.ended(self.event)

    def __del__(self) -> None:
        self._free.append(self.event)


class _OwnStream:
    """Not one of torch's, which others have too: a kernel that waits on it keeps nobody else waiting."""

    def __init__(self, device: int) -> None:
        self._runtime = cuda_runtime()
        self._device = device
        self._runtime.set_device(device)
        self.handle = self._runtime.new_stream()
        self._events: list[int] = []

    def after(self, moment: Moment) -> None:
        self._runtime.wait(self.handle, cast(_Event, moment).event)

    def moment(self) -> Moment:
        if self._events:
            event = self._events.pop()
        else:
            self._runtime.set_device(self._device)
            event = self._runtime.event()
        self._runtime.record(event, self.handle)
        return _Moment(event, self._runtime, self._events)

    def close(self) -> None:
        self._runtime.end_stream(self.handle)


class CudaNccl:
    """RuntimeError where there is no NCCL."""

    def __init__(self, device: torch.device, max_ctas: int = MAX_CTAS) -> None:
        self._device = int(device.index or 0)
        self._max_ctas = max_ctas
        self._nccl = Nccl()

    def unique_id(self) -> bytes:
        return self._nccl.unique_id()

    def line(self, unique_id: bytes, rank: int, wake: Callable[[], None]) -> NcclLine:
        def meet(stream: Stream, given_up: Callable[[], bool]) -> Communicator:
            cuda_runtime().set_device(self._device)  # the line's thread's from now on
            # Blocking: a call of one that is not costs 450 µs, for it is handed to a thread of NCCL's.
            ends = self._nccl.communicator(unique_id, rank, 2, max_ctas=self._max_ctas, blocking=True)
            try:
                _connect(ends, rank, stream, given_up)
            except BaseException:
                ends.abort()
                raise
            return ends

        return NcclLine(meet, _OwnStream(self._device), 1 - rank, wake)


def _connect(ends: Communicator, rank: int, stream: Stream, given_up: Callable[[], bool]) -> None:
    """A word from one to the other. It is in memory of its own: nobody knows when NCCL is done with it,
    should the peer stop here."""
    word = cuda_runtime().allocate(_WORD_BYTES)
    move = ends.send if rank == 0 else ends.receive
    move(word, _WORD_BYTES, 1 - rank, stream.handle)
    moved = stream.moment()
    while not moved.ended():
        if given_up():
            raise NcclError("ncclRecv", Result.REMOTE_ERROR, "the peer was given up before it came")
        time.sleep(_LOOK_S)
    cuda_runtime().free(word)
