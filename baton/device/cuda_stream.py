"""A stream of CUDA's that nobody else has, and moments in what it is told.

Torch hands out the same 32 again and again: what waits in one of those keeps somebody else waiting.
"""

from __future__ import annotations

import contextlib
from typing import Protocol, cast

from baton.device.cuda_runtime import CudaError, CudaRuntime, cuda_runtime


class _Recorded(Protocol):
    """A moment on CUDA: of a stream of ours, or of a lane."""

    event: int


class CudaMoment:
    """Its event is another's when nobody asks any more."""

    def __init__(self, event: int, runtime: CudaRuntime, free: list[int]) -> None:
        self.event = event
        self._runtime = runtime
        self._free = free

    def ended(self) -> bool:
        return self._runtime.ended(self.event)

    def __del__(self) -> None:
        self._free.append(self.event)


class CudaStream:
    """By whoever tells it: one thread at a time, whose device it becomes where that is needed."""

    def __init__(self, device: int, events: list[int], *, first: bool = False) -> None:
        """`events`: of this device, that nobody uses. `first`: before what else the device has to do."""
        self._runtime = cuda_runtime()
        self._device = device
        self._events = events
        self._runtime.set_device(device)
        self.handle = self._runtime.new_stream(first=first)

    def moment(self) -> CudaMoment:
        """Here and now."""
        event = self._events.pop() if self._events else self._new_event()
        self._runtime.record(event, self.handle)
        return CudaMoment(event, self._runtime, self._events)

    def after(self, moment: object) -> None:
        """What is told from now on begins when another stream has come to this moment of its."""
        self._runtime.wait(self.handle, cast(_Recorded, moment).event)

    def wait_for(self, moment: object) -> None:
        """Waits until this stream has come to a moment of its."""
        self._runtime.wait_for(cast(_Recorded, moment).event)

    def finish(self) -> None:
        """Waits until all that it was told is done."""
        self._runtime.finish(self.handle)

    def close(self) -> None:
        """When all that it was told is done; nothing is told any more. Idempotent, and done by its end."""
        handle, self.handle = self.handle, 0
        if handle:
            self._runtime.end_stream(handle)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, CudaError):  # it was never made; the process ends
            self.close()

    def _new_event(self) -> int:
        self._runtime.set_device(self._device)
        return self._runtime.event()
