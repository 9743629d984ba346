"""Memory that two processes share: an anonymous file, mapped by both.

A memfd has no name, so nothing can attach to it by guessing and nothing is left behind when both
processes are gone. Whoever creates it hands the descriptor to the other, its child or a peer. Its size is
sealed: neither can take pages away from under the other, who would die of it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """A mapped memfd of `size` bytes, which go with their last user. `fd` may be inherited."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, name: str, size: int) -> SharedMemory:
        """Makes zeroed memory; `name` only shows in /proc. The descriptor is inheritable by `pass_fds`."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, size)

    @classmethod
    def attach(cls, fd: int) -> SharedMemory:
        """Maps what another created. ValueError for a descriptor whose size could change."""
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("memory that is not sealed may vanish")
        return cls(fd, os.fstat(fd).st_size)

    def region(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A typed view of `count` elements at `offset` bytes."""
        end = offset + count * np.dtype(dtype).itemsize
        if end > self.size:
            raise ValueError(f"a region ends at byte {end} of {self.size}")
        return self.bytes[offset:end].view(dtype)

    def drop_descriptor(self) -> None:
        """The mapping stays; nobody can be given it any more. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def keep_from_children(self) -> None:
        """A fork does not map it: what can write it ends with this process."""
        self._map.madvise(mmap.MADV_DONTFORK)

    def unmap(self) -> None:
        """This process can no longer touch the memory. BufferError where a view of it is left."""
        self.bytes = np.empty(0, dtype=np.uint8)
        self._map.close()
