"""Makes the C library keep freed memory instead of returning it to the kernel at once."""

from __future__ import annotations

import contextlib
import ctypes

# Names and numbers of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_KEPT = 32 << 20  # more is not allowed
_KEPT_BYTES = 128 << 20
_STEP_BYTES = 16 << 20


def keep_freed_memory() -> None:
    """Keeps up to 128 MiB per heap. For processes that allocate and free about 1 MiB for each message: gRPC
    copies each three times, and every time the kernel had to find, clear and map 256 pages.

    Does nothing where the C library is not glibc.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_TOP_PAD, _STEP_BYTES)
