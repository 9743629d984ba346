"""A `LinkDevice` whose memory is a file's and whose streams do their work when they are pumped.

In one process, streams of all devices are pumped together, some work at a time, by each query of an
event and by the test: enqueued work is done late and in parts, as on a GPU, but in an order drawn by seed.
With `Pump(None)` work is done when it is enqueued, for ends in different processes.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from baton.device.shared_memory import SharedMemory
from baton.device.streams.link_device import Kernel, LinkStream, Mapped, Memory
from baton.device.streams.stream import Event

_HANDLE = struct.Struct("<II")
_FREED = 0xDD


class Pump:
    """Does the work of streams, in the order of each stream."""

    def __init__(self, seed: int | None) -> None:
        self.at_once = seed is None
        self.stands = False  # while set, only work that is waited for is done
        self._dice = random.Random(seed)
        self._streams: list[FakeStream] = []
        self.steps = 0

    def add(self, stream: FakeStream) -> None:
        self._streams.append(stream)

    def some(self) -> None:
        """A little work, of any streams."""
        if self.stands:
            return
        for _ in range(self._dice.choice([0, 0, 1, 2, 5])):
            able = [stream for stream in self._streams if stream.able()]
            if not able:
                return
            self._dice.choice(able).step()
            self.steps += 1

    def step_one(self) -> bool:
        """The first stream that is able to does one thing, even while the pump stands; False: none is."""
        able = next((stream for stream in self._streams if stream.able()), None)
        if able is not None:
            able.step()
        return able is not None

    def idle(self) -> bool:
        return not any(stream.left for stream in self._streams)


class _FakeEvent:
    handle = 0

    def __init__(self, stream: FakeStream, place: int) -> None:
        self.stream, self.place = stream, place

    def passed(self) -> bool:
        return self.stream.done >= self.place

    def query(self) -> bool:
        if not self.passed():
            self.stream.pump.some()
        return self.passed()

    def synchronize(self) -> None:
        self.stream.do_until(self.passed)


class _Elsewhere:
    """An event of a stream of another kind."""

    def __init__(self, event: Event) -> None:
        self.passed = event.query


class FakeStream:
    handle = 0

    def __init__(self, pump: Pump) -> None:
        self.pump = pump
        self.left: deque[Callable[[], None] | _FakeEvent | _Elsewhere] = deque()
        self.done = 0
        self._enqueued = 0
        pump.add(self)

    def copy(self, destination: int, source: int, size: int) -> None:
        def move() -> None:
            ctypes.memmove(destination, source, size)

        self._enqueue(move)

    def copy_batch(self, destination: int, sources: Sequence[int], size: int) -> None:
        for n, source in enumerate(sources):
            self.copy(destination + n * size, source, size)

    def run(self, work: Callable[[], None]) -> None:
        self._enqueue(work)

    def launch(self, kernel: Kernel, grid: tuple[int, int], addresses: tuple[int, ...]) -> None:
        raise AssertionError("a fake device runs plain torch only")

    def publish(self, address: int, value: int) -> None:
        def store() -> None:
            ctypes.c_uint64.from_address(address).value = value

        self._enqueue(store)

    def record_event(self) -> Event:
        return _FakeEvent(self, self._enqueued)

    def wait_event(self, event: Event) -> None:
        self._enqueue(event if isinstance(event, _FakeEvent) else _Elsewhere(event))

    def synchronize(self) -> None:
        self.do_until(lambda: not self.left)

    def close(self) -> None:
        """Does nothing: no resource was made."""

    def do_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            first = self.left[0]
            if isinstance(first, _FakeEvent) and not first.passed():
                first.stream.synchronize()
            if isinstance(first, _Elsewhere):
                while not first.passed():
                    time.sleep(1e-4)
            self.step()

    def able(self) -> bool:
        return bool(self.left) and (not isinstance(self.left[0], _Waits) or self.left[0].passed())

    def step(self) -> None:
        work = self.left.popleft()
        if not isinstance(work, _Waits):
            work()
        self.done += 1

    def _enqueue(self, work: Callable[[], None] | _FakeEvent | _Elsewhere) -> None:
        self.left.append(work)
        self._enqueued += 1
        while self.pump.at_once and self.able():
            self.step()


_Waits = (_FakeEvent, _Elsewhere)


class _FakeMemory:
    def __init__(self, size: int) -> None:
        self.size = size
        self._shared = SharedMemory.create("baton-fake-device", size)
        self._bytes = self._shared.bytes
        self.address = int(self._bytes.ctypes.data)
        self.tensor: Tensor = torch.from_numpy(self._bytes)
        self.freed = False

    def handle(self) -> bytes:
        return _HANDLE.pack(os.getpid(), self._shared.fd)

    def free(self) -> None:
        """Overwrites the memory, so that later reads find garbage."""
        if not self.freed:
            self.freed = True
            self._bytes[:] = _FREED
            self._shared.drop_descriptor()


class FakeDevice:
    """Reaches the devices of `peers`, and itself."""

    def __init__(self, pump: Pump, name: str = "fake:0", peers: tuple[str, ...] = ()) -> None:
        self.name = name
        self.tensors_on = torch.device("cpu")
        self.allocated: list[_FakeMemory] = []
        self.streams: list[FakeStream] = []
        self.zeros: list[Tensor] = []
        # From now on: no allocation, no other's memory.
        self.full = self.blind = False
        self.launching: AbstractContextManager[object] = nullcontext()
        self._pump = pump
        self._peers = (name, *peers)

    def reaches(self, name: str) -> bool:
        return name in self._peers

    def allocate(self, size: int) -> Memory:
        if self.full:
            raise OSError(f"no {size} bytes on {self.name}")
        self.allocated.append(_FakeMemory(size))
        return self.allocated[-1]

    def allocate_own(self, size: int) -> Memory:
        return self.allocate(size)

    def open(self, handle: bytes) -> Mapped:
        if self.blind:
            raise OSError(f"{self.name} cannot write there")
        process, descriptor = _HANDLE.unpack_from(handle)
        shared = SharedMemory.attach(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR))
        shared.drop_descriptor()
        return Mapped(int(shared.bytes.ctypes.data), shared.unmap)

    def register(self, memory: SharedMemory) -> Mapped:
        return Mapped(int(memory.bytes.ctypes.data), lambda: None)

    def stream(self, *, high_priority: bool = False) -> LinkStream:
        self.streams.append(FakeStream(self._pump))
        return self.streams[-1]

    def host_zeros(self, rows: int, columns: int) -> Tensor:
        self.zeros.append(torch.zeros((rows, columns), dtype=torch.int64))
        return self.zeros[-1]
