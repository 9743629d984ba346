"""A line of work beside all else on a device: the host says what is to be done, goes on, and looks later
whether it has ended. A host's own lane does it at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class Moment(Protocol):
    """A place in a lane's work."""

    def ended(self) -> bool:
        """Whether all that was said before it is done."""

    def seconds_since(self, earlier: Moment) -> float:
        """The device's time between two moments of one lane that have both ended."""


class Lane(Protocol):
    """What is said within `work` is done in that order."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the host goes on before the work is done."""

    def work(self) -> contextlib.AbstractContextManager[None]:
        """Around the host's saying what is to be done: behind all that was said on the device before."""

    def moment(self) -> Moment:
        """Here and now; called within `work`."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, whole once a later moment has ended; called within `work`."""


def lane_of(device: torch.device) -> Lane:
    """A stream of its own on a GPU."""
    return GpuLane(device) if device.type == "cuda" else HostLane()


class _HostMoment:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def ended(self) -> bool:
        return True

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _HostMoment)
        return self._at - earlier._at


class HostLane:
    """Done when it is said."""

    runs_ahead = False

    def work(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def moment(self) -> Moment:
        return _HostMoment()

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor


class _GpuMoment:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()
        self.event = int(self._event.cuda_event)  # by which a line of a link's device waits for it

    def ended(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _GpuMoment)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class GpuLane:
    """A stream: copies that others make of what has ended do not wait for what has not."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def moment(self) -> Moment:
        return _GpuMoment()

    def to_host(self, tensor: Tensor) -> Tensor:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return there.copy_(tensor, non_blocking=True)
