"""Memory that two processes share: an anonymous file (memfd) that both map.

A memfd has no name, so no other process can guess it, and nothing is left behind when both processes have
ended.
Its creator passes the descriptor to the other, a child or a peer. Its size is sealed: neither process can
truncate it, which would crash the other.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """A mapped memfd of `size` bytes, freed with its last user. `fd` can be inherited; it is closed with this
    object where `create` has made it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._close_descriptor: Callable[[], object] = partial(os.close, fd)
        self._map = mmap.mmap(fd, size)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, name: str, size: int) -> SharedMemory:
        """Zeroed memory; `name` shows in /proc only. A child gets the descriptor by `pass_fds`."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = cls(fd, size)
        closing = weakref.finalize(memory, os.close, fd)
        closing.atexit = False  # the process's end closes it, after the last thread that uses it
        memory._close_descriptor = closing
        return memory

    @classmethod
    def attach(cls, fd: int) -> SharedMemory:
        """Maps another process's memory. ValueError for a descriptor whose size is not sealed."""
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("shared memory must be sealed")
        return cls(fd, os.fstat(fd).st_size)

    def region(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A typed view of `count` elements at `offset` bytes."""
        end = offset + count * np.dtype(dtype).itemsize
        if end > self.size:
            raise ValueError(f"a region ends at byte {end} of {self.size}")
        return self.bytes[offset:end].view(dtype)

    def drop_descriptor(self) -> None:
        """Closes the descriptor, so that it cannot be passed on; the mapping stays. Idempotent."""
        if self.fd >= 0:
            self._close_descriptor()
        self.fd = -1

    def keep_from_children(self) -> None:
        """Keeps forked children from mapping it, so that only this process can write it."""
        self._map.madvise(mmap.MADV_DONTFORK)

    def unmap(self) -> None:
        """Unmaps it from this process. BufferError where a view of it exists."""
        self.bytes = np.empty(0, dtype=np.uint8)
        self._map.close()
