"""CUDA graphs: a fixed list of launches, captured once and replayed by one call.

A captured graph is a callable: it enqueues all launches after what was enqueued before, and returns at once.
On a CPU it calls the launches again: there a kernel runs in Triton's interpreter when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Graph = Callable[[], None]


class Recorder:
    """Captures graphs that share one memory pool, since no two of them run at a time. Each is replayed on
    torch's current stream."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """`priority`: of the stream to capture on."""
        self._device = device
        self.on_chip = device.type == "cuda"
        """True if there is a GPU."""
        if self.on_chip:
            self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Runs `launch` once, to compile its kernels, with whatever its buffers contain, then captures it.
        RuntimeError where the device has no memory for it."""
        if not self.on_chip:
            return launch
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Around both: a failed capture leaves its stream as the current one.
        with torch.cuda.stream(self._stream):
            launch()
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                launch()
        return graph.replay


class GraphStream(Recorder):
    """A recorder whose graphs are replayed on the stream that captured them, with a side stream for work that
    a step need not wait for."""

    def __init__(self, device: torch.device) -> None:
        # High priority: other work on the GPU waits for decode steps, not they for it.
        super().__init__(device, priority=-1)
        if self.on_chip:
            self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream on which graphs are replayed; None on a CPU."""
        return self._stream if self.on_chip else None

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Captures like `Recorder.capture`, then replays once, since a graph's first replay also uploads it
        to the GPU."""
        graph = super().capture(launch)
        if not self.on_chip:
            return graph

        def replay() -> None:
            with torch.cuda.stream(self._stream):
                graph()

        replay()
        return replay

    def fork(self, launch: Callable[[], None]) -> None:
        """Runs `launch`, during a capture, in parallel with what follows until `join`."""
        if not self.on_chip:
            launch()
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            launch()

    def join(self) -> None:
        """Makes what follows, during a capture, wait for the side stream."""
        if self.on_chip:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def drain(self) -> None:
        """Blocks until all enqueued work has finished."""
        if self.on_chip:
            self._stream.synchronize()
