"""Clocks, power and temperature of the GPUs meanwhile: one may be slower than another, or than it was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import mean

_FIELDS = "timestamp,index,clocks.sm,power.draw,temperature.gpu"
_WRITTEN = "%Y/%m/%d %H:%M:%S.%f"


@contextlib.asynccontextmanager
async def gpu_samples(path: Path) -> AsyncIterator[None]:
    """Writes a line for each GPU and second to `path`; none where there is no driver."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", "--loop=1"]
    with path.open("wb") as file:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=file, stderr=asyncio.subprocess.DEVNULL
            )
        except OSError:
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


def clocks_between(path: Path, gpus: Sequence[str], begun: datetime, ended: datetime) -> str:
    """The means of these GPUs between two times, local ones, in words; empty where there is no sample."""
    found: dict[str, list[tuple[float, ...]]] = {gpu: [] for gpu in gpus}
    for line in path.read_text().splitlines():
        written, *fields = [field.strip() for field in line.split(",")]
        with contextlib.suppress(ValueError):  # a last line may be cut off, a field not be supported
            gpu, *values = fields
            if gpu in found and begun <= datetime.strptime(written, _WRITTEN) <= ended and len(values) == 3:
                found[gpu].append(tuple(map(float, values)))
    said = []
    for gpu, samples in found.items():
        if samples:
            clock, power, temperature = map(mean, zip(*samples, strict=True))
            said.append(f"GPU {gpu} {clock:.0f} MHz, {power:.0f} W, {temperature:.0f} °C")
    return "; ".join(said)
