"""NCCL channels of a GPU of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from baton.device.cuda_runtime import cuda_runtime
from baton.device.nccl.nccl_channel import NcclChannel
from baton.device.nccl.nccl_library import Communicator, Nccl, NcclError, Result
from baton.device.streams.cuda_stream import CudaStream
from baton.device.streams.stream import Stream

# Multiprocessors that a channel's kernels may take: with fewer, NCCL 2.28 moves pieces of up to 128 MiB at
# half the rate; between two H200s 16 move 340 GB/s, 8 of them 245 (docs/decisions/0015).
MAX_CTAS = 32
_PROBE_BYTES = 64
_POLL_S = 0.001


class CudaNccl:
    """Makes channels. RuntimeError where there is no NCCL."""

    def __init__(self, device: torch.device, launching: AbstractContextManager[object] | None = None) -> None:
        """`launching`: see `NcclChannel`; held while device memory is allocated, too."""
        self._launching = launching or nullcontext()
        self._device = int(device.index or 0)
        self._nccl = Nccl()
        # Idle buffers in device memory; never freed, since cudaFree waits for all work on the device.
        self._probes: list[int] = []

    def unique_id(self) -> bytes:
        """Names a channel that is about to be made."""
        return self._nccl.unique_id()

    def channel(self, unique_id: bytes, rank: int, wake: Callable[[], None]) -> NcclChannel:
        """Creates one end of the channel with this id; `rank` is 0 or 1."""

        def connect(stream: Stream, given_up: Callable[[], bool]) -> Communicator:
            cuda_runtime().set_device(self._device)  # of the channel's thread
            # Blocking: a call of a non-blocking one costs 450 µs, since NCCL hands it to a thread.
            communicator = self._nccl.communicator(unique_id, rank, 2, max_ctas=MAX_CTAS, blocking=True)
            try:
                self._exchange(communicator, rank, stream, given_up)
            except BaseException:
                communicator.abort()
                raise
            return communicator

        return NcclChannel(connect, CudaStream(self._device, []), 1 - rank, wake, self._launching)

    def _exchange(
        self, communicator: Communicator, rank: int, stream: Stream, given_up: Callable[[], bool]
    ) -> None:
        """Moves a few bytes from rank 0 to rank 1. If the peer stops meanwhile the buffer is leaked: NCCL may
        access it at any later time."""
        with self._launching:
            probe = self._probes.pop() if self._probes else cuda_runtime().allocate(_PROBE_BYTES)
        move = communicator.send if rank == 0 else communicator.receive
        move(probe, _PROBE_BYTES, 1 - rank, stream.handle)
        moved = stream.record_event()
        while not moved.query():
            if given_up():
                raise NcclError("ncclRecv", Result.REMOTE_ERROR, "aborted before the peer connected")
            time.sleep(_POLL_S)
        self._probes.append(probe)
