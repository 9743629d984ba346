"""Where Triton caches compiled kernels between starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIABLE = "TRITON_CACHE_DIR"


def keep_kernels_in(folder: str | Path) -> None:
    """Sets the cache folder of this process and its children."""
    os.environ[_VARIABLE] = str(Path(folder).expanduser())


def kernel_cache() -> Path:
    """The cache folder, created if missing: that of `keep_kernels_in`, `$TRITON_CACHE_DIR`, or Triton's
    default.

    OSError where it cannot be written.
    """
    import triton

    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is not writable")
    return folder


@dataclass(slots=True)
class Kernels:
    """How many kernels were needed, and how many of them had to be compiled."""

    needed: int = 0
    compiled: int = 0


@contextmanager
def counted_kernels() -> Iterator[Kernels]:
    """Counts the kernels that Triton loads or compiles within the block, which must not be nested."""
    import triton

    kernels = Kernels()

    def count(*, cache_hit: bool, **_: Any) -> None:  # noqa: ANN401
        kernels.needed += 1
        kernels.compiled += not cache_hit

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = count
    try:
        yield kernels
    finally:
        triton.knobs.compilation.listener = before
