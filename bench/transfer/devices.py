"""Blocks on a GPU for `bench.transfer`, and as many bytes by a copy engine or by NCCL alone."""

from __future__ import annotations

import ctypes
import random
import time

import torch
from torch import Tensor

from baton.device.cuda_runtime import call, cuda_driver
from baton.device.nccl.cuda_nccl import MAX_CTAS
from baton.device.nccl.nccl_library import Nccl
from baton.device.streams.cuda_link_device import CudaLinkDevice
from baton.device.streams.cuda_stream import CudaStream
from baton.device.streams.stream import Event
from bench.processes import JsonLinesProcess
from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
from kvtransfer.device.movers import warm

# 64 tokens of an 8B model in 16 bits.
GPU_BLOCK_BYTES = 8 << 20
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_SENDER, _RECEIVER = 0, 1
_KEEP_WARM_CYCLES = 5_000_000  # 2.5 ms of an H200's


class GpuBlocks:
    """A pool of blocks on a GPU; the place of a transfer's nth block is drawn in advance."""

    def __init__(self, count: int, device: torch.device, block_bytes: int = GPU_BLOCK_BYTES) -> None:
        self._pool = _random_pool(count, device, block_bytes)
        self._places = random.Random(1).sample(range(count), count)
        self.blocks = DeviceBlocks(CudaLinkDevice(device), [self._pool])
        warm(self.blocks)

    def sink(self) -> DeviceSink:
        """The pool as a receiver's sink; clears it."""
        self._pool.zero_()
        torch.cuda.synchronize(self._pool.device)
        return DeviceSink(self.blocks, lambda transfer, group, ordinal: self._places[ordinal])

    def place(self, ordinal: int) -> int:
        """The pool's number of a sender's nth block."""
        return self._places[ordinal]

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        return self._pool[block, offset : offset + length].cpu().numpy().data

    def unpin(self, group: int, block: int) -> None:
        """Does nothing: blocks are not shared."""

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._pool[self._places[ordinal], offset : offset + len(data)].copy_(source)

    def equal(self, blocks: int) -> bool:
        """True if the last transfer's blocks equal those of a sender's pool; clears the pool."""
        sent = _random_pool(len(self._pool), self._pool.device, self._pool.shape[1])
        same = all(torch.equal(self._pool[place], sent[place]) for place in self._places[:blocks])
        self._pool.zero_()
        torch.cuda.synchronize(self._pool.device)
        return same


def gpu_blocks(count: int, device: str, block_bytes: int = GPU_BLOCK_BYTES) -> GpuBlocks:
    """A pool on `device`, cuda:N."""
    there = torch.device(device)
    torch.cuda.set_device(there)
    return GpuBlocks(count, there, block_bytes)


def _random_pool(count: int, device: torch.device, block_bytes: int) -> Tensor:
    """A pool of random bytes, equal in every process."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (count, block_bytes // 4)
    numbers = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device, generator=generator)
    return numbers.view(torch.uint8)


class HeldStep:
    """A stand-in for a prefill step, whose end event completes when the host releases it. One kernel thread
    keeps the otherwise idle GPU warm meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._step = CudaStream(int(device.index or 0), [])
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._seen = self._word.numpy()
        self._count = 0

    def begin(self) -> Event:
        """Starts a step; the event of its end."""
        self._count += 1
        torch.cuda._sleep(_KEEP_WARM_CYCLES)  # type: ignore[no-untyped-call]
        call(
            cuda_driver(), "cuStreamWaitValue64_v2", ctypes.c_void_p(self._step.handle),
            ctypes.c_uint64(self._word.data_ptr()), ctypes.c_uint64(self._count), _AT_LEAST,
        )  # fmt: skip
        return self._step.record_event()

    def end(self) -> float:
        """Ends the step; the time just before, by the monotonic clock in s."""
        at = time.monotonic()
        self._seen[0] = self._count
        return at


class RawCopies:
    """A copy of `size` bytes between two GPUs, or within one, timed on the GPU."""

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


class RawEnd:
    """One of two ends, made at the same time, of a communicator beside the link's that takes as many
    multiprocessors."""

    def __init__(self, unique_id: bytes, size: int, device: str, *, sends: bool) -> None:
        torch.cuda.set_device(torch.device(device))
        self._bytes = torch.full((size,), 7, dtype=torch.uint8, device=device)
        self._where = self._bytes.data_ptr(), size
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._peer = _RECEIVER if sends else _SENDER
        self._communicator = Nccl().communicator(
            unique_id, 1 - self._peer, 2, max_ctas=MAX_CTAS, blocking=True
        )
        # The first call of a pair connects the two ends and blocks for the other's: it is made during set-up.
        if sends:
            self.send()
        else:
            self.receive()

    def receive(self) -> None:
        """Enqueues a receive; returns at once."""
        self._communicator.receive(*self._where, self._peer, int(self._stream.cuda_stream))

    def send(self) -> float:
        """The device time in s."""
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record(self._stream)
        self._communicator.send(*self._where, self._peer, int(self._stream.cuda_stream))
        ended.record(self._stream)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    def close(self) -> None:
        self._communicator.abort()


class RawNccl:
    """NCCL alone with as many bytes: one send of all of them to a receive that waits for it. The
    sender's end, which asks the receiver's process for the other."""

    def __init__(self, receiver: JsonLinesProcess, size: int, device: str) -> None:
        self._receiver = receiver
        unique_id = Nccl().unique_id()
        receiver.send_command({"raw_id": unique_id.hex(), "size": size})
        self._end = RawEnd(unique_id, size, device, sends=True)
        receiver.receive()

    def seconds(self) -> float:
        self._receiver.call({"raw_receive": True})
        return self._end.send()

    def close(self) -> None:
        self._end.close()
