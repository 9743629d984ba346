"""CUDA graphs: a fixed list of launches, captured once and replayed by one call.

On a CPU a replay calls the launches again: there a kernel runs in Triton's interpreter when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Replayable(Protocol):
    """A captured list of launches."""

    def replay(self) -> None:
        """Enqueues all launches after what was enqueued before; returns at once."""


class _Rerun:
    def __init__(self, launch: Callable[[], None]) -> None:
        self.replay = launch


class Recorder:
    """Captures graphs that share one memory pool, since no two of them run at a time. Each is replayed on
    torch's current stream."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: to capture on; by default a new one."""
        self._device = device
        self._on_chip = device.type == "cuda"
        if self._on_chip:
            self._stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], None]) -> Replayable:
        """Runs `launch` once, to compile its kernels, with whatever its buffers contain, then captures it.
        RuntimeError where the device has no memory for it."""
        if not self._on_chip:
            return _Rerun(launch)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Around both: a failed capture leaves its stream as the current one.
        with torch.cuda.stream(self._stream):
            launch()
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                launch()
        return graph


class GraphStream:
    """A stream on which graphs are replayed, with a side stream for work that a step need not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            # High priority: other work on the GPU waits for decode steps, not they for it.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._recorder = Recorder(device, self._stream if device.type == "cuda" else None)

    @property
    def on_chip(self) -> bool:
        """Whether there is a GPU."""
        return self._device.type == "cuda"

    def capture(self, launch: Callable[[], None]) -> Replayable:
        """As `Recorder.capture`, followed by one replay, since a graph's first replay also uploads it to the
        GPU."""
        graph = _BoundGraph(self._recorder.capture(launch), self)
        if self.on_chip:
            graph.replay()
        return graph

    def fork(self, launch: Callable[[], None]) -> None:
        """Within a capture: runs `launch` in parallel with what follows, until `join`."""
        if not self.on_chip:
            launch()
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            launch()

    def join(self) -> None:
        """Within a capture: what follows waits for the side stream."""
        if self.on_chip:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def replay(self, graph: Replayable) -> None:
        """Enqueues a graph on this stream."""
        if not self.on_chip:
            graph.replay()
            return
        with torch.cuda.stream(self._stream):
            graph.replay()

    def drain(self) -> None:
        """Blocks until all enqueued work has finished."""
        if self.on_chip:
            self._stream.synchronize()


class _BoundGraph:
    """A graph that is replayed on one stream."""

    def __init__(self, graph: Replayable, stream: GraphStream) -> None:
        self._graph = graph
        self._stream = stream

    def replay(self) -> None:
        self._stream.replay(self._graph)
