"""A temporary folder that its process owns for as long as it lives, and that a later one removes if it was
killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def owned_folder(prefix: str) -> Iterator[str]:
    """Makes a folder among the temporary ones and removes it at the end. Removes those with this prefix whose
    processes have ended without that: the kernel has released their locks, whatever namespace they were
    in."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if (lock := _locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    while True:
        folder = tempfile.mkdtemp(prefix=prefix)
        lock = _locked(Path(folder))
        # Another start may have found it before it was locked.
        if lock is not None and os.path.exists(folder):
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """The descriptor that holds the folder's lock; None where another process has it, or it is not ours."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
