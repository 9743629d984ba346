"""Lines of NCCL on a GPU of this process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from baton.device.cuda_runtime import cuda_runtime
from baton.device.cuda_stream import CudaStream
from baton.device.nccl import Communicator, Nccl, NcclError, Result
from baton.device.nccl_line import NcclLine, Stream

# Multiprocessors that a line's kernels may take: of fewer NCCL 2.28 gives pieces of up to 128 MiB half only,
# and between two H200s 16 move 340 GB/s, 8 of them 245 (docs/decisions/0015).
MAX_CTAS = 32
_WORD_BYTES = 64
_LOOK_S = 0.001


class CudaNccl:
    """RuntimeError where there is no NCCL."""

    def __init__(self, device: torch.device, max_ctas: int = MAX_CTAS) -> None:
        self._device = int(device.index or 0)
        self._max_ctas = max_ctas
        self._nccl = Nccl()
        # Of the device's memory, that no line uses: never freed, which would wait for all that runs there.
        self._words: list[int] = []

    def unique_id(self) -> bytes:
        return self._nccl.unique_id()

    def line(self, unique_id: bytes, rank: int, wake: Callable[[], None]) -> NcclLine:
        def meet(stream: Stream, given_up: Callable[[], bool]) -> Communicator:
            cuda_runtime().set_device(self._device)  # the line's thread's from now on
            # Blocking: a call of one that is not costs 450 µs, for it is handed to a thread of NCCL's.
            ends = self._nccl.communicator(unique_id, rank, 2, max_ctas=self._max_ctas, blocking=True)
            try:
                self._connect(ends, rank, stream, given_up)
            except BaseException:
                ends.abort()
                raise
            return ends

        return NcclLine(meet, CudaStream(self._device, []), 1 - rank, wake)

    def _connect(self, ends: Communicator, rank: int, stream: Stream, given_up: Callable[[], bool]) -> None:
        """A word from one to the other. Nobody knows when NCCL is done with it, should the peer stop here:
        then it is lost."""
        try:
            word = self._words.pop()
        except IndexError:
            word = cuda_runtime().allocate(_WORD_BYTES)
        move = ends.send if rank == 0 else ends.receive
        move(word, _WORD_BYTES, 1 - rank, stream.handle)
        moved = stream.moment()
        while not moved.ended():
            if given_up():
                raise NcclError("ncclRecv", Result.REMOTE_ERROR, "the peer was given up before it came")
            time.sleep(_LOOK_S)
        self._words.append(word)
