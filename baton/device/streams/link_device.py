"""Interfaces by which two processes of a host write each other's device memory in a defined order.

    receiver                              sender
    memory = device.allocate(size)
    memory.handle()          ────────▶    opened = device.open(handle)
                                          stream.copy(opened.address, …)     enqueued, nothing waits here;
                                          stream.publish(counter, n)         done in the order of enqueueing
    reads n at `counter`: all that was copied before is there
    memory.free()            ◀────────    opened.close()

`cuda_link_device` implements it on CUDA. On a CPU none is needed: both processes map a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.device.shared_memory import SharedMemory
from baton.device.streams.stream import Stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_HANDLE_BYTES = 128


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel of this process's current context: its handle, threads a block, bytes of shared
    memory."""

    function: int
    threads: int
    shared: int


class LinkStream(Stream, Protocol):
    """A stream that copies between addresses and launches kernels; only `synchronize` blocks."""

    def copy(self, destination: int, source: int, size: int) -> None:
        """Enqueues a copy of `size` bytes between two addresses, at least one of which is on a device."""

    def copy_batch(self, destination: int, sources: Sequence[int], size: int) -> None:
        """Enqueues copies of `size` bytes from each of at most 64 addresses, placed one after another from
        `destination` on."""

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work` with this as torch's current stream."""

    def launch(self, kernel: Kernel, grid: tuple[int, int], addresses: tuple[int, ...]) -> None:
        """Enqueues a kernel whose arguments are at most five addresses."""

    def publish(self, address: int, value: int) -> None:
        """Enqueues a store of 8 bytes into registered memory; an observer of it sees the effects of all work
        enqueued before."""


class Memory(Protocol):
    """An allocation of device memory that another process can open; it holds nothing else."""

    @property
    def address(self) -> int: ...

    @property
    def tensor(self) -> Tensor:
        """Returns the whole memory as a tensor, uint8 [size]."""

    def handle(self) -> bytes:
        """Returns the handle with which another process opens the memory; at most `MAX_HANDLE_BYTES`
        bytes."""

    def free(self) -> None:
        """Frees it; every process that opened it must have closed it, or ended. Idempotent."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Memory that streams of this process may write: another process's, or the host's.

    `address`: its first byte, as the device addresses it. `close` ends that, before host memory is unmapped;
    every stream that wrote it must have been synchronized.
    """

    address: int
    close: Callable[[], None]


class LinkDevice(Protocol):
    """One device of one process. All methods but `open` and `register` are called by the engine's loop."""

    @property
    def name(self) -> str:
        """Identifies the device on this host, the same in every process."""

    def reaches(self, name: str) -> bool:
        """True if this device can write the memory of the device called `name`, or if only `open` can
        tell."""

    def allocate(self, size: int) -> Memory:
        """Memory that other processes can open. OSError where the device has none left."""

    def allocate_own(self, size: int) -> Memory:
        """Memory that no other process opens: freeing it does not synchronize with the device. OSError."""

    def open(self, handle: bytes) -> Mapped:
        """Opens the memory of another process by its handle. Raises OSError if it cannot be opened."""

    def register(self, memory: SharedMemory) -> Mapped:
        """Makes host memory writable by the device. OSError where it cannot reach it."""

    def stream(self, *, high_priority: bool = False) -> LinkStream:
        """A new stream. `high_priority`: its kernels go before those of other streams that wait."""

    def host_zeros(self, rows: int, columns: int) -> Tensor:
        """Zeros, int64 [rows, columns], in host memory that kernels access by the same address."""

    @property
    def tensors_on(self) -> torch.device: ...

    @property
    def launching(self) -> AbstractContextManager[object]:
        """Held while a step is launched on devices that wait for one another, and by other threads around
        calls that may wait for the device: it may be waiting for a launch that would wait behind such a call.
        A context that holds nothing for one device."""
