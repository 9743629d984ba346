"""Streams and events: work that a device does in order, and points in it that others wait for.

The terms and semantics are CUDA's. `cuda_stream` implements both on a GPU; on a CPU work is done when it is
enqueued (`HostStream`). Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Event(Protocol):
    """A point in a stream's work."""

    @property
    def handle(self) -> int:
        """The cudaEvent_t; 0 for an event of no GPU."""

    def query(self) -> bool:
        """True once all work enqueued before the event has finished."""

    def synchronize(self) -> None:
        """Blocks until all work enqueued before the event has finished."""


class TimedEvent(Event, Protocol):
    """An event that has a time stamp."""

    def seconds_since(self, earlier: TimedEvent) -> float:
        """Device time between two completed events of one stream, in seconds."""


class Stream(Protocol):
    """Work on a device, done in the order in which it is enqueued."""

    @property
    def handle(self) -> int:
        """The stream as a cudaStream_t."""

    def record_event(self) -> Event:
        """Records an event after all work enqueued so far."""

    def wait_event(self, event: Event) -> None:
        """Makes work enqueued from now on start after `event`, which may be of another stream."""

    def synchronize(self) -> None:
        """Blocks until all enqueued work has finished."""

    def close(self) -> None:
        """Destroys the stream; all its work must have finished. Idempotent."""


class ComputeStream(Protocol):
    """A stream of torch operations, separate from whatever else runs on the device."""

    @property
    def asynchronous(self) -> bool:
        """True if operations return before their work is done."""

    @property
    def in_turn(self) -> bool:
        """True if its work is serialised with that of another stream, in the order in which both are
        enqueued, so that neither slows the other."""

    def activate(self) -> contextlib.AbstractContextManager[None]:
        """Makes it torch's current stream, behind all work enqueued on the stream that was current."""

    def record_event(self) -> TimedEvent:
        """Records an event after all work enqueued so far. Only while active."""

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Enqueues a copy to host memory, valid once an event recorded later completes. Only while active."""


class HostEvent:
    """An event of a `HostStream`: complete when it is recorded."""

    handle = 0

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns at once: the host's work is done when it is recorded."""

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, HostEvent)
        return self._at - earlier._at


class HostStream:
    """A `ComputeStream` on a CPU: every operation is done when it returns."""

    asynchronous = False
    in_turn = False

    def activate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record_event(self) -> TimedEvent:
        return HostEvent()

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        return tensor
