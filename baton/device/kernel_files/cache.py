"""The folder in which Triton caches compiled kernels between starts, and kernels that an image brings
along."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.device.kernel_files.manifest import MANIFEST

_VARIABLE = "TRITON_CACHE_DIR"
# Triton's list of a kernel's files begins so; a process that finds it takes the files as complete.
_LIST_PREFIX = "__grp__"


def keep_kernels_in(folder: str | Path) -> None:
    """Sets the cache folder of this process and its children."""
    os.environ[_VARIABLE] = str(Path(folder).expanduser())


def copy_shipped_kernels(source: Path, cache: Path) -> int:
    """Copies the files below `source` that are missing below `cache`; returns how many.

    Several processes may do so at the same time: each file appears whole, the list of a kernel's files last.
    Raises OSError.
    """
    files = (path for path in source.rglob("*") if path.is_file() and path.name != MANIFEST)
    copied = 0
    for path in sorted(files, key=lambda path: (path.parent, path.name.startswith(_LIST_PREFIX))):
        target = cache / path.relative_to(source)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        if path.name.startswith(_LIST_PREFIX):
            content = _relocated(content, target.parent)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
            part.write(content)
        os.chmod(part.name, path.stat().st_mode & 0o777)
        os.replace(part.name, target)
        copied += 1
    return copied


def _relocated(content: bytes, folder: Path) -> bytes:
    """Triton's list of a kernel's files, which has absolute paths, for files in `folder`.

    Raises OSError where it is not such a list.
    """
    try:
        paths = json.loads(content)["child_paths"]
        return json.dumps({"child_paths": {name: str(folder / name) for name in paths}}).encode()
    except (ValueError, KeyError, TypeError):
        raise OSError(errno.EINVAL, "it has a damaged list of kernels") from None


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


def cached_code(folder: str, key: bytes, compile_code: Callable[[], bytes]) -> bytes:
    """Code that another compiler than Triton made, from a file of this folder of the cache, or compiled and
    put there. `key`: of all that decides on it. Counted as Triton's own kernels are (`counted_kernels`).

    Raises what `compile_code` raises, and OSError where the cache cannot be used.
    """
    path = kernel_cache() / folder / hashlib.sha256(key).hexdigest()
    found = path.is_file()
    code = path.read_bytes() if found else compile_code()
    if not found:
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(code)
        os.replace(part.name, path)
    _report(cache_hit=found)
    return code


def _report(*, cache_hit: bool) -> None:
    import triton

    if (listener := triton.knobs.compilation.listener) is not None:
        listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)


@dataclass(slots=True)
class Kernels:
    """Number of kernels that were needed, and of those that had to be compiled."""

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
