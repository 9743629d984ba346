"""A `LinkDevice` whose memory is a file's and whose lines do their work when they are pumped.

In one process, lines of all devices are pumped together, some work at a time, by whoever asks whether a
moment has ended, and by the test: what is said is done late and in pieces, as on a GPU, but by seed. With
`Pump(None)` it is done when it is said, for ends in different processes.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.device.link_device import Kernel, Line, Memory, Moment, Opened, Registered
from baton.device.shared_memory import SharedMemory

_HANDLE = struct.Struct("<II")
_FREED = 0xDD


class Pump:
    """Does what lines were told, in the order of each line."""

    def __init__(self, seed: int | None) -> None:
        self.at_once = seed is None
        self.stands = False  # while set, nothing is done but what somebody waits for
        self._dice = random.Random(seed)
        self._lines: list[_FakeLine] = []
        self.steps = 0

    def add(self, line: _FakeLine) -> None:
        self._lines.append(line)

    def some(self) -> None:
        """A little work, of any lines."""
        if self.stands:
            return
        for _ in range(self._dice.choice([0, 0, 1, 2, 5])):
            able = [line for line in self._lines if line.able()]
            if not able:
                return
            self._dice.choice(able).step()
            self.steps += 1

    def idle(self) -> bool:
        return not any(line.left for line in self._lines)


class _FakeMoment:
    def __init__(self, line: _FakeLine, place: int) -> None:
        self.line, self.place = line, place

    def passed(self) -> bool:
        return self.line.done >= self.place

    def ended(self) -> bool:
        if not self.passed():
            self.line.pump.some()
        return self.passed()


class _Elsewhere:
    """A moment that no line of ours comes to."""

    def __init__(self, moment: Moment) -> None:
        self.passed = moment.ended


class _FakeLine:
    def __init__(self, pump: Pump) -> None:
        self.pump = pump
        self.left: deque[Callable[[], None] | _FakeMoment | _Elsewhere] = deque()
        self.done = 0
        self._said = 0
        pump.add(self)

    def copy(self, destination: int, source: int, size: int) -> None:
        def move() -> None:
            ctypes.memmove(destination, source, size)

        self._say(move)

    def copy_together(self, destination: int, sources: Sequence[int], size: int) -> None:
        for n, source in enumerate(sources):
            self.copy(destination + n * size, source, size)

    def run(self, work: Callable[[], None]) -> None:
        self._say(work)

    def launch(self, kernel: Kernel, grid: tuple[int, int], addresses: tuple[int, ...]) -> None:
        raise AssertionError("a played device runs what is plain torch")

    def publish(self, address: int, value: int) -> None:
        def store() -> None:
            ctypes.c_uint64.from_address(address).value = value

        self._say(store)

    def moment(self) -> Moment:
        return _FakeMoment(self, self._said)

    def after(self, moment: Moment) -> None:
        self._say(moment if isinstance(moment, _FakeMoment) else _Elsewhere(moment))

    def wait_for(self, moment: Moment) -> None:
        assert isinstance(moment, _FakeMoment)
        assert moment.line is self
        self._do_until(moment.passed)

    def finish(self) -> None:
        self._do_until(lambda: not self.left)

    def _do_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            first = self.left[0]
            if isinstance(first, _FakeMoment) and not first.passed():
                first.line.finish()
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

    def _say(self, work: Callable[[], None] | _FakeMoment | _Elsewhere) -> None:
        self.left.append(work)
        self._said += 1
        while self.pump.at_once and self.able():
            self.step()


_Waits = (_FakeMoment, _Elsewhere)


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

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        return self._bytes[part].copy()

    def free(self) -> None:
        """Another's from here on: whoever reads it reads nonsense."""
        if not self.freed:
            self.freed = True
            self._bytes[:] = _FREED
            self._shared.drop_descriptor()


class _FakeOpened:
    def __init__(self, handle: bytes) -> None:
        process, descriptor = _HANDLE.unpack_from(handle)
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        self._shared = SharedMemory.attach(opened)
        self._shared.drop_descriptor()
        self.address = int(self._shared.bytes.ctypes.data)

    def close(self) -> None:
        self._shared.unmap()


class _FakeRegistered:
    def __init__(self, memory: SharedMemory) -> None:
        self.address = int(memory.bytes.ctypes.data)

    def release(self) -> None:
        """Nothing was done."""


class FakeDevice:
    """Reaches the devices of `peers`, and itself."""

    def __init__(self, pump: Pump, name: str = "fake:0", peers: tuple[str, ...] = ()) -> None:
        self.name = name
        self.tensors_on = torch.device("cpu")
        self.allocated: list[_FakeMemory] = []
        # From now on: no allocation, no other's memory.
        self.full = self.blind = False
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

    def open(self, handle: bytes) -> Opened:
        if self.blind:
            raise OSError(f"{self.name} cannot write there")
        return _FakeOpened(handle)

    def register(self, memory: SharedMemory) -> Registered:
        return _FakeRegistered(memory)

    def line(self, *, first: bool = False) -> Line:
        return _FakeLine(self._pump)

    def on_host(self, rows: int, columns: int) -> Tensor:
        return torch.zeros((rows, columns), dtype=torch.int64)
