"""Memory that the C library has handed out in this process, as malloc counts it (mallinfo2(3))."""

from __future__ import annotations

import ctypes


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    ] + [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def heap_bytes() -> int:
    """Bytes that the heap of the C library has allocated now; 0 where the library does not report them."""
    try:
        read = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    read.restype = _Mallinfo2
    info = read()
    return int(info.uordblks + info.hblkhd)


def return_free_memory() -> None:
    """Gives memory that was freed back to the kernel, where the C library can."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    trim(0)
