"""What two processes of a host need of their devices to write each other's memory in an order.

    receiver                              sender
    memory = device.allocate(size)
    memory.handle()          ────────▶    there = device.open(handle)
                                          line.copy(there.address, …)       nothing waits here:
                                          line.publish(word, n)             done in the order it was said
    sees n in `word`: what was copied before is there
    memory.free()            ◀────────    there.close()

`cuda_link_device` has CUDA's. A CPU needs none: its processes map a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.device.shared_memory import SharedMemory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HANDLE_ROOM = 128


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel of this process's current context: its handle, threads of a block, shared bytes."""

    function: int
    threads: int
    shared: int


class Moment(Protocol):
    """A place in a line."""

    def ended(self) -> bool:
        """Whether all that was said before it is done."""


class Line(Protocol):
    """Work that is done in the order it is said; only `finish` waits."""

    def copy(self, destination: int, source: int, size: int) -> None:
        """Bytes between two addresses, of which one at least is on a device."""

    def copy_together(self, destination: int, sources: Sequence[int], size: int) -> None:
        """`size` bytes from each of at most 64 places, one behind the other from `destination` on."""

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work`, whose kernels are part of this line."""

    def launch(self, kernel: Kernel, grid: tuple[int, int], addresses: tuple[int, ...]) -> None:
        """`run`, for a kernel whose arguments are addresses alone: four at most."""

    def publish(self, address: int, value: int) -> None:
        """Stores 8 bytes into registered memory; whoever sees them sees all that was done before."""

    def moment(self) -> Moment:
        """Here and now."""

    def after(self, moment: Moment) -> None:
        """What is said from now on begins when another line, or a lane, has come to this moment."""

    def wait_for(self, moment: Moment) -> None:
        """Waits until this line has come to a moment of its."""

    def finish(self) -> None:
        """Waits until all that was said is done."""


class Memory(Protocol):
    """An allocation of the device's, for itself and whoever opens it; nothing else lies in it."""

    @property
    def size(self) -> int: ...

    @property
    def address(self) -> int: ...

    @property
    def tensor(self) -> Tensor:
        """All of it: uint8."""

    def handle(self) -> bytes:
        """By which another process opens it; `HANDLE_ROOM` bytes at most."""

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        """A copy on the host; waits for the device."""

    def free(self) -> None:
        """When every opener has closed it, or has ended. Idempotent."""


class Opened(Protocol):
    """Another process's memory."""

    @property
    def address(self) -> int: ...

    def close(self) -> None:
        """From here on this process cannot touch it. When every line that wrote it has finished."""


class Registered(Protocol):
    """Memory of the host's that a line may write."""

    @property
    def address(self) -> int:
        """Where a line finds its first byte."""

    def release(self) -> None:
        """Before it is unmapped, and when every line that wrote it has finished."""


class LinkDevice(Protocol):
    """One device of one process. Every method but `open` and `register` is called by the loop."""

    @property
    def name(self) -> str:
        """The same in every process of this host."""

    def reaches(self, name: str) -> bool:
        """Whether this device can write the memory of the one so named; yes where only `open` can tell."""

    def allocate(self, size: int) -> Memory:
        """OSError where there is no room."""

    def allocate_own(self, size: int) -> Memory:
        """As `allocate`, of what no other process opens: to free it waits for nothing on the device."""

    def open(self, handle: bytes) -> Opened:
        """OSError where it cannot be opened."""

    def register(self, memory: SharedMemory) -> Registered:
        """OSError where the device cannot reach it."""

    def line(self, *, first: bool = False) -> Line:
        """`first`: before what else the device has to do, where it can choose."""

    def on_host(self, rows: int, columns: int) -> Tensor:
        """int64 zeros on the host, which kernels read and write by the same address."""

    @property
    def tensors_on(self) -> torch.device: ...
