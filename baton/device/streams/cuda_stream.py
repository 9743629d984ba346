"""Streams and events on a GPU.

`CudaStream` owns its CUDA stream. Torch hands out the same 32 streams again and again: work that waits in
one of those would hold up an unrelated user of the same stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from baton.device.cuda_runtime import CudaError, CudaRuntime, cuda_runtime
from baton.device.streams.link_device import Kernel
from baton.device.streams.stream import ComputeStream, Event, HostStream, TimedEvent


class CudaEvent:
    """An event without a time stamp. Its handle returns to the pool when it is garbage-collected."""

    def __init__(self, handle: int, runtime: CudaRuntime, pool: list[int]) -> None:
        self.handle = handle
        self._runtime = runtime
        self._pool = pool

    def query(self) -> bool:
        return self._runtime.query_event(self.handle)

    def synchronize(self) -> None:
        self._runtime.call("cudaEventSynchronize", self.handle)

    def __del__(self) -> None:
        self._pool.append(self.handle)


class CudaStream:
    """A CUDA stream: a `Stream` and a `LinkStream`.

    Not thread-safe; sets the calling thread's current device to its own where a call needs it.
    """

    def __init__(self, device: int, event_pool: list[int], *, high_priority: bool = False) -> None:
        """`event_pool`: handles of unused events of this device; shared by streams of one thread."""
        self._runtime = cuda_runtime()
        self._device = device
        self._event_pool = event_pool
        self._runtime.set_device(device)
        self.handle = self._runtime.create_stream(high_priority=high_priority)

    def record_event(self) -> Event:
        event = self._event_pool.pop() if self._event_pool else self._create_event()
        self._runtime.call("cudaEventRecord", event, self.handle)
        return CudaEvent(event, self._runtime, self._event_pool)

    def wait_event(self, event: Event) -> None:
        self._runtime.call("cudaStreamWaitEvent", self.handle, event.handle, 0)

    def synchronize(self) -> None:
        self._runtime.call("cudaStreamSynchronize", self.handle)

    def copy(self, destination: int, source: int, size: int) -> None:
        self._runtime.copy(destination, source, size, self.handle)

    def copy_batch(self, destination: int, sources: Sequence[int], size: int) -> None:
        self._runtime.copy_batch(destination, sources, size, self._device, self.handle)

    def run(self, work: Callable[[], None]) -> None:
        stream = torch.cuda.ExternalStream(self.handle, self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            work()

    def launch(self, kernel: Kernel, grid: tuple[int, int], addresses: tuple[int, ...]) -> None:
        self._runtime.set_device(self._device)
        self._runtime.launch(kernel.function, grid, kernel.threads, kernel.shared, self.handle, addresses)

    def publish(self, address: int, value: int) -> None:
        self._runtime.set_device(self._device)
        self._runtime.write_value(address, value, self.handle)

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            self._runtime.call("cudaStreamDestroy", handle)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, CudaError):  # construction failed; the process is exiting
            self.close()

    def _create_event(self) -> int:
        self._runtime.set_device(self._device)
        return self._runtime.create_event()


class TorchEvent:
    """A timed event, recorded on torch's current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()
        self.handle = int(self._event.cuda_event)

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, TorchEvent)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class TorchStream:
    """A `ComputeStream` on a GPU. Copies that other streams make of finished work do not wait for its later
    work."""

    asynchronous = True

    def __init__(self, device: torch.device, other: torch.cuda.Stream | None = None) -> None:
        """`other`: what is enqueued while this stream is active begins when all that was enqueued there has
        ended, and what is enqueued there afterwards begins when it has."""
        self._device = device
        self._other = other
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def in_turn(self) -> bool:
        return self._other is not None

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._other is not None:
            self._stream.wait_stream(self._other)
        with torch.cuda.stream(self._stream):
            yield
        if self._other is not None:
            self._other.wait_stream(self._stream)

    def record_event(self) -> TimedEvent:
        return TorchEvent()

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


class StreamGroup:
    """A `ComputeStream` on several GPUs: what is enqueued on one of them while it is active is on that one's
    stream. Events and copies are the first one's."""

    asynchronous = True

    def __init__(self, first: TorchStream, others: Sequence[TorchStream]) -> None:
        self._first = first
        self._others = others

    @property
    def in_turn(self) -> bool:
        return self._first.in_turn

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        with contextlib.ExitStack() as active:
            # The first one's last: it is the current device then.
            for stream in (*self._others, self._first):
                active.enter_context(stream.activate())
            yield

    def record_event(self) -> TimedEvent:
        return self._first.record_event()

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        return self._first.copy_to_host(tensor)


def compute_stream(device: torch.device, *others: torch.device) -> ComputeStream:
    """A stream of its own on a GPU, or one on each of several; a `HostStream` on a CPU."""
    if device.type != "cuda":
        return HostStream()
    first = TorchStream(device)
    return StreamGroup(first, [TorchStream(other) for other in others]) if others else first


DEFAULT_STREAM = 0
"""The handle of the stream that is current unless another is made so."""


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream of a device; of a CPU the default stream's."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else DEFAULT_STREAM


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU torch's current device within the context; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
