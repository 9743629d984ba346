"""Memory of a GPU that the other GPUs of this process load and store.

Peer access reaches what "cudaMalloc" has allocated, and neither pools of cudaMallocAsync nor torch's
expandable segments, which are of virtual addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from baton.base.errors import BatonError, ErrorKind
from baton.device.cuda_runtime import CudaRuntime, cuda_runtime
from baton.device.nvidia_libraries import EAGER_LOADING

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OUT_OF_REACH = ("expandable_segments:true", "backend:cudamallocasync")


def enable_peer_access(devices: Sequence[int], runtime: CudaRuntime | None = None) -> None:
    """Lets kernels of each device address the memory of each other one. Raises BatonError (INVALID) where two
    are the same, or one cannot; the message names them."""
    runtime = runtime or cuda_runtime()
    if len(set(devices)) < len(devices):
        raise BatonError(ErrorKind.INVALID, f"devices {list(devices)} of a worker: one is named twice")
    for index, other in itertools.permutations(devices, 2):
        if not runtime.enable_peer_access(index, other):
            raise BatonError(
                ErrorKind.INVALID,
                f"devices {list(devices)} of a worker: device {index} has no peer access to device {other}"
                " (nvidia-smi topo -p2p r lists the pairs that have)",
            )


def refuse_other_allocators(environment: Mapping[str, str]) -> None:
    """Raises BatonError (INVALID) where torch is configured to allocate memory that no peer reaches."""
    for name in _ALLOCATOR_VARIABLES:
        options = environment.get(name, "").lower().replace(" ", "")
        for option in _OUT_OF_REACH:
            if option in options:
                raise BatonError(
                    ErrorKind.INVALID,
                    f"{name}={environment[name]}: devices of a worker cannot reach such memory; unset it",
                )


def refuse_launches_that_wait(environment: Mapping[str, str]) -> None:
    """Raises BatonError (INVALID) where a launch waits for its kernel to end, which may be waiting for one
    that would be launched next on another device."""
    name = "CUDA_LAUNCH_BLOCKING"
    if environment.get(name, "0") not in ("", "0"):
        raise BatonError(
            ErrorKind.INVALID,
            f"{name}={environment[name]}: devices of a worker wait for one another; unset it",
        )


def refuse_lazy_loading(runtime: CudaRuntime | None = None) -> None:
    """Raises BatonError(INVALID) where this process loads kernels when they are first launched, which waits
    for the device: it may be waiting for another one, whose kernel is launched next."""
    if (runtime or cuda_runtime()).loads_lazily():
        name, value = EAGER_LOADING
        raise BatonError(ErrorKind.INVALID, f"devices of a worker need {name}={value} from its start")


class _PlainBytes:
    """Bytes of a GPU, as torch takes them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def plain_bytes(device: int, size: int) -> Tensor:
    """Zeroed memory of "cudaMalloc", which is never freed; the device is idle when it returns, since others
    may write it from then on. Makes `device` the current one; CudaError."""
    runtime = cuda_runtime()
    runtime.set_device(device)
    place = torch.device("cuda", device)
    found: Tensor = torch.as_tensor(_PlainBytes(runtime.allocate(size), size), device=place)
    found.zero_()
    torch.cuda.synchronize(place)
    return found
