"""`python -m services.cluster.gpus.gpu_count`: writes how many GPUs a process started here may use.

Only the driver can evaluate CUDA_VISIBLE_DEVICES (numbers, UUIDs, MIG instances) and a container's limits,
and workers use it too. A process that has called it keeps devices open, so it is called in this short-lived
process.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Protocol

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


class Driver(Protocol):
    """The functions of libcuda that count devices; each returns 0 or an error number."""

    def cuInit(self, flags: int, /) -> int: ...  # noqa: N802
    def cuDeviceGetCount(self, count: object, /) -> int: ...  # noqa: N802


def gpu_count(driver: Driver) -> int:
    """The number of visible GPUs. Raises RuntimeError where the driver fails."""
    count = ctypes.c_int()
    result = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if result not in (0, _NO_DEVICE):
        raise RuntimeError(f"the driver fails with error {result}")
    return count.value


def find_driver() -> Driver | None:
    """libcuda, or None where it is not installed. Opens no device."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def main() -> int:
    """Prints the number and returns 0, or prints the error and returns 1."""
    driver = find_driver()
    try:
        print(0 if driver is None else gpu_count(driver))
    except RuntimeError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
