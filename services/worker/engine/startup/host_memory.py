"""Settings that take more memory than the host has, refused by name before it is allocated."""

from __future__ import annotations

import re
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind

MEMORY = Path("/proc/meminfo")


def check_available(setting: str, size: int, memory: Path = MEMORY) -> None:
    """Raises BatonError(INVALID) where `size` bytes for `setting` are more than the host has left."""
    _check(setting, size, "MemAvailable", "are available", memory)


def check_installed(setting: str, size: int, memory: Path = MEMORY) -> None:
    """Raises BatonError(INVALID) where `size` bytes for `setting` are more than the whole host has. For
    memory that is used little by little, and by some loads not at all."""
    _check(setting, size, "MemTotal", "are there", memory)


def _check(setting: str, size: int, line: str, what: str, memory: Path) -> None:
    found = re.search(rf"^{line}:\s+(\d+) kB", memory.read_text(), re.MULTILINE)
    if found is not None and size > int(found[1]) * 1024:
        raise BatonError(
            ErrorKind.INVALID,
            f"engine.{setting} of {size / 1e9:.3g} GB does not fit: "
            f"{int(found[1]) * 1024 / 1e9:.3g} GB of memory {what}",
        )
