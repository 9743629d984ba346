"""Memory that two processes of one worker share: an anonymous file, mapped by both.

A memfd has no name, so nothing can attach to it by guessing and nothing is left behind when both
processes are gone. The parent creates it and hands the descriptor to its child.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt


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
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def attach(cls, fd: int) -> SharedMemory:
        """Maps what the parent created."""
        return cls(fd, os.fstat(fd).st_size)

    def region(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A typed view of `count` elements at `offset` bytes."""
        end = offset + count * np.dtype(dtype).itemsize
        if end > self.size:
            raise ValueError(f"a region ends at byte {end} of {self.size}")
        return self.bytes[offset:end].view(dtype)
