"""Times launches on the GPU: captured as a graph, replayed, the median of its events."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch


def graph_us(launch: Callable[[], None], replays: int = 12) -> float:
    """Microseconds of one replay of all launches of `launch`."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(replays + 1)
    ]
    for _ in range(3):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return float(times[len(times) // 2]) * 1e3
