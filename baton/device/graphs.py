"""A fixed list of launches, captured once and replayed without the host saying it again.

On a CPU the twin just runs the list: there, a kernel runs in Triton's interpreter when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Replayable(Protocol):
    def replay(self) -> None:
        """Enqueues all of it behind what was enqueued before; returns at once."""


class _Rerun:
    def __init__(self, launch: Callable[[], None]) -> None:
        self.replay = launch


class Recorder:
    """Captures lists of launches that share their memory, since no two of them run at a time. Each is
    replayed on the stream that is current then."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: to capture on; by default one of its own."""
        self._device = device
        self._on_chip = device.type == "cuda"
        if self._on_chip:
            self._stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], None]) -> Replayable:
        """`launch` runs once to compile its kernels, on whatever its buffers hold, and is captured. Raises
        RuntimeError where the device has no memory for it."""
        if not self._on_chip:
            return _Rerun(launch)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Around both: a capture that fails leaves its stream the current one.
        with torch.cuda.stream(self._stream):
            launch()
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                launch()
        return graph


class Queue:
    """A stream of replays, and a branch beside it for what a step need not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            # The steps before all else: whatever shares the GPU waits for them, not they for it.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._recorder = Recorder(device, self._stream if device.type == "cuda" else None)

    @property
    def on_chip(self) -> bool:
        return self._device.type == "cuda"

    def capture(self, launch: Callable[[], None]) -> Replayable:
        """`launch` as `Recorder.capture` says; replayed once, since a graph's first replay also brings it to
        the GPU."""
        queued = _Queued(self._recorder.capture(launch), self)
        if self.on_chip:
            queued.replay()
        return queued

    def fork(self, launch: Callable[[], None]) -> None:
        """Within a capture: `launch` on a branch beside all that follows, until `join`."""
        if not self.on_chip:
            launch()
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            launch()

    def join(self) -> None:
        """Within a capture: what follows waits for the branch."""
        if self.on_chip:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def replay(self, graph: Replayable) -> None:
        if not self.on_chip:
            graph.replay()
            return
        with torch.cuda.stream(self._stream):
            graph.replay()

    def drain(self) -> None:
        """Waits until all that was enqueued has ended."""
        if self.on_chip:
            self._stream.synchronize()


class _Queued:
    """A replayable bound to its queue."""

    def __init__(self, graph: Replayable, queue: Queue) -> None:
        self._graph = graph
        self._queue = queue

    def replay(self) -> None:
        self._queue.replay(self._graph)
