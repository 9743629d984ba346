"""A kernel that holds multiprocessors of a GPU for a while, and does nothing else."""

from __future__ import annotations

import time
from functools import cache

import torch

from baton.device.cuda_source import CudaFunction, compile_source

_SOURCE = """
extern "C" __global__ void occupy(unsigned int* running, int milliseconds) {
  unsigned long long begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  atomicAdd(running, 1u);
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begun < milliseconds * 1000000ull);
}
"""
# More than half of what a multiprocessor has, so that it runs one such block, and beside it no other kernel's
# that wants as much.
_SHARED_BYTES = 160 * 1024


@cache
def _function() -> CudaFunction:
    major, minor = torch.cuda.get_device_capability()
    return CudaFunction(compile_source(_SOURCE, f"sm_{major}{minor}"), "occupy", _SHARED_BYTES)


class Occupant:
    """Holds `count` multiprocessors for a number of milliseconds, on `stream` or one of its own. It holds all
    of them when this returns."""

    def __init__(self, count: int, milliseconds: int, stream: torch.cuda.Stream | None = None) -> None:
        running = torch.zeros(1, dtype=torch.int32, device="cuda")
        function = _function()
        torch.cuda.synchronize()
        self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream or torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            function.launch(count, 32, (running, milliseconds))
            self._ended.record()
        until = time.monotonic() + 5.0
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            while int(running) < count:
                assert time.monotonic() < until, "the occupant does not get its multiprocessors"

    @property
    def ended(self) -> bool:
        return bool(self._ended.query())  # type: ignore[no-untyped-call]
