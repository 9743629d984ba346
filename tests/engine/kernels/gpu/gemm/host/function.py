"""A compiled kernel that runs on the host, in place of a `CudaFunction`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from baton.device.cuda_source import Argument
from tests.support.host_kernels import host_library

_HOST = Path(__file__).with_name("host.cpp")


class HostFunction:
    """`streamed_product` from its source. `late`: copies to shared memory take effect when they are waited
    for, rather than at once; `turned`: the blocks run from the last to the first."""

    def __init__(self, source: str, folder: Path, shared_bytes: int, *, late: bool, turned: bool) -> None:
        self._library = host_library(source, _HOST, folder)
        self._library.shared_bytes.restype = ctypes.c_ulong
        assert shared_bytes <= self._library.shared_bytes()
        self._late, self._turned = late, turned

    def launch(self, blocks: int, threads: int, arguments: Sequence[Argument]) -> None:
        """Runs it to its end; `threads` is in the source already."""
        given = b""
        for argument in arguments:
            if isinstance(argument, Tensor):
                given += struct.pack("P", argument.data_ptr())
            else:
                given += struct.pack("i", argument)
        self._library.run(
            given, ctypes.c_int(blocks), ctypes.c_bool(not self._late), ctypes.c_bool(self._turned)
        )
