"""Loads all kernels of this process's libraries onto a GPU at once, and measures what that takes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.device.cuda_runtime import call, cuda_driver


@dataclass(frozen=True, slots=True)
class LoadedKernels:
    """Seconds that it took to make a GPU's context and to load all kernels, and bytes that these take."""

    seconds: float
    bytes: int


def load_kernels(
    index: int, driver: ctypes.CDLL | None = None, clock: Callable[[], float] = time.monotonic
) -> LoadedKernels:
    """Loads the kernels of all libraries onto a GPU, in a process that loads them at once (`EAGER_LOADING`).

    The driver makes the device's context, without any kernel; CUDA's runtime, which torch calls, registers
    the libraries with its first call, and loads them. So this is to be that call (`NO_RUNTIME`): a context
    that is made later gets all kernels as it is made, and 0 bytes are found. Memory that other processes
    allocate meanwhile counts. Raises CudaError.
    """
    driver = driver or cuda_driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    began = clock()
    call(driver, "cuInit", 0)
    call(driver, "cuDeviceGet", ctypes.byref(device), index)
    call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call(driver, "cuCtxPushCurrent_v2", context)
    call(driver, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    call(driver, "cuCtxPopCurrent_v2", ctypes.byref(context))
    left, _ = torch.cuda.mem_get_info(index)
    return LoadedKernels(clock() - began, max(0, free.value - left))
