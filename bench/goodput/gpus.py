"""The GPUs of this machine, shared out among arms."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator

_NVIDIA_SMI_S = 30.0


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; empty without a driver."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [part for part in given.split(",") if part]
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


class GpuPool:
    """Gives each taker GPUs of its own, in the order of asking."""

    def __init__(self, gpus: list[str]) -> None:
        self._free = list(gpus)
        self.size = len(gpus)
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[list[str]]:
        """Waits for `count` free GPUs, of those there are."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield taken
        finally:
            async with self._changed:
                self._free += taken
                self._changed.notify_all()
