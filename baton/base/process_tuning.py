"""Settings of Linux and of the C library for a process: how its threads are woken, how exact their waits are,
and which freed memory it keeps."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1
_SWITCH_S = 0.0005
# Names and numbers of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_KEPT = 32 << 20  # more is not allowed
_KEPT_BYTES = 128 << 20
_STEP_BYTES = 16 << 20


def batch_wakeups() -> None:
    """Keeps threads of this process that are woken from interrupting the one that runs (SCHED_BATCH,
    sched(7)): this thread, and threads and children that it starts from now on, wait until whatever runs on
    their core pauses. For processes of one event loop and the threads that feed it.

    gRPC's own thread is woken for every message that was written or received. By default it interrupts the
    event loop, which is in the middle of a burst of them, for a message that the loop will not look at before
    the burst ends: two switches a message.

    Every process may ask for it; a sandbox that does not support it leaves all as it was.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def switch_threads_often() -> None:
    """Lets a thread of this process that waits for Python's lock get it after 0.5 ms instead of 5. For
    processes of one event loop beside which another thread computes for longer, such as one that encodes
    traces."""
    sys.setswitchinterval(_SWITCH_S)


def prompt_wakeups() -> None:
    """Undoes `batch_wakeups`, which a child inherits: this thread, and those that it starts from now on,
    run as soon as they are woken."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def sharpen_timers() -> None:
    """Makes short waits end when they should, of this thread and those that it starts from now on. By default
    Linux adds up to 50 µs to each wait, to wake others together with it: more than the 20 µs after which an
    engine polls again."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)


def keep_freed_memory() -> None:
    """Makes the C library keep up to 128 MiB of freed memory per heap instead of returning it to the kernel
    at once. For processes that allocate and free about 1 MiB for each message: gRPC copies each three times,
    and every time the kernel had to find, clear and map 256 pages.

    Does nothing where the C library is not glibc.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_TOP_PAD, _STEP_BYTES)
