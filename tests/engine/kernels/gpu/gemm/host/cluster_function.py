"""`wide_product` on the host, in place of a `CudaFunction`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from baton.device.cuda_source import Argument
from tests.support.host_kernels import host_library

_HOST = Path(__file__).with_name("cluster.cpp")


def host_map(tensor: Tensor, rows: int, box: tuple[int, int]) -> ctypes.Array[ctypes.c_char]:
    """Returns what stands for `tensor_map` on the host."""
    assert tensor.is_contiguous()
    assert box[0] <= 256, "the most that a GPU loads at a time"
    packed = struct.pack("PqqQ96x", tensor.data_ptr(), tensor.shape[1], rows, box[0])
    return (ctypes.c_char * 128).from_buffer_copy(packed)


class ClusterFunction:
    """`wide_product` from its source, whose threads run in random order. `early`: the matrix units multiply
    at once, rather than as late as when their results are waited for."""

    def __init__(self, source: str, folder: Path, *, early: bool) -> None:
        self._library = host_library(source, _HOST, folder)
        self._library.run.restype = ctypes.c_char_p
        self._early, self._runs = early, 0

    def launch(self, blocks: int, threads: int, arguments: Sequence[Argument]) -> None:
        """Runs it to its end; fails where a barrier is misused or no thread goes on."""
        assert threads == 384
        given = b""
        for argument in arguments:
            if isinstance(argument, Tensor):
                given += struct.pack("P", argument.data_ptr())
            else:
                given += struct.pack("i", argument) if isinstance(argument, int) else bytes(argument)
        self._runs += 1
        failure = self._library.run(
            given, ctypes.c_int(blocks), ctypes.c_bool(self._early), ctypes.c_int(self._runs)
        )
        assert not failure, failure.decode()
