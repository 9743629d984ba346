"""How an NCCL kernel that waits on the device affects other work there, for `bench.nccl`."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LAYERS, _WIDTH, _INNER, _ROWS = 24, 4096, 14336, 64


def new_stream(priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def passed(event: torch.cuda.Event) -> bool:
    """RuntimeError once CUDA has failed in this process."""
    return bool(event.query())  # type: ignore[no-untyped-call]


class Steps:
    """A graph shaped like a decode step: 5.6 GB of weights read once, 64 rows, small kernels between."""

    def __init__(self) -> None:
        def weights(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * 0.01

        self._up = [weights(_WIDTH, _INNER) for _ in range(_LAYERS)]
        self._down = [weights(_INNER, _WIDTH) for _ in range(_LAYERS)]
        self._rows = weights(_ROWS, _WIDTH)
        # High priority, as the engine's.
        self._stream = new_stream(priority=-1)
        with torch.cuda.stream(self._stream):
            self._step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._step()

    def measure(self, replays: int) -> dict[str, Any]:
        """The time in µs from one replay's end to the next's: median, and slowest of twenty."""
        events = [new_event() for _ in range(replays + 1)]
        deadline = time.perf_counter() + 10
        with torch.cuda.stream(self._stream):
            self._graph.replay()
            events[0].record()
            for event in events[1:]:
                self._graph.replay()
                event.record()
        while not passed(events[-1]):
            if time.perf_counter() > deadline:
                return {"ended": False}
            time.sleep(1e-4)
        times = sorted(a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events))
        return {
            "step_us": round(times[len(times) // 2], 1),
            "step_us_p95": round(times[len(times) * 19 // 20], 1),
        }

    def begin(self) -> None:
        """Replays in a thread until `end`, with at most three queued."""
        self._going = True
        self._gaps: list[float] = []
        self._thread = threading.Thread(target=self._go_on, args=(torch.cuda.current_device(),), daemon=True)
        self._thread.start()

    def end(self) -> dict[str, Any]:
        """As `measure`, with the maximum."""
        self._going = False
        self._thread.join(5)
        times = sorted(self._gaps)
        if self._thread.is_alive() or not times:
            return {"ended": False}
        middle, slowest = times[len(times) // 2], times[-1]
        return {"steps": len(times), "step_us": round(middle, 1), "step_us_max": round(slowest, 1)}

    def _go_on(self, device: int) -> None:
        torch.cuda.set_device(device)
        waiting: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(self._stream):
            while self._going:
                self._graph.replay()
                waiting.append(new_event())
                waiting[-1].record()
                while len(waiting) > 3 and self._going:
                    if passed(waiting[1]):
                        self._gaps.append(waiting[0].elapsed_time(waiting[1]) * 1e3)
                        waiting.popleft()
                    else:
                        time.sleep(1e-4)

    def _step(self) -> Tensor:
        rows: Tensor = self._rows
        for up, down in zip(self._up, self._down, strict=True):
            rows = torch.nn.functional.layer_norm(
                rows + torch.nn.functional.silu(rows @ up) @ down, (_WIDTH,)
            )
        return rows


class Calls:
    """CUDA calls that an engine may make at any time, made while a kernel waits on the device."""

    def __init__(self, device: int) -> None:
        """Allocates all memory in advance, since allocating may block itself."""
        self._device = device
        self._rows = torch.randn(512, 512, device="cuda").mul_(1.0)
        self._page = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        self._pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        self._host = torch.zeros(1 << 20, dtype=torch.uint8)
        self._graph = torch.cuda.CUDAGraph()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        host = self._host.data_ptr(), self._host.numel()
        self._calls: dict[str, Callable[[], object]] = {
            "kernel, seen before": lambda: self._rows.mul_(1.0),
            "copy to pinned memory": lambda: self._pinned.copy_(self._page[: 1 << 20], non_blocking=True),
            "cudaMalloc": lambda: torch.empty(128 << 20, dtype=torch.uint8, device="cuda"),
            "cudaHostRegister": lambda: runtime.cudaHostRegister(*host, 3),
            "cudaHostAlloc": lambda: torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True),
            "kernel, never loaded": lambda: torch.atan2(self._rows, self._rows),
            "matrix product, new": lambda: self._rows.double() @ self._rows.double(),
            "cudaHostUnregister": lambda: runtime.cudaHostUnregister(host[0]),
            "graph, captured": self._capture,
            "cudaFree": self._free,
        }

    def make(self, first: int, limit_s: float) -> dict[str, str]:
        """Makes the calls in order from the `first` on, each in a thread: how long it took, or `waits` after
        `limit_s`. Stops at one that blocks: later ones might wait for its lock."""
        answers: dict[str, str] = {}
        for name in list(self._calls)[first:]:
            answers[name] = self._within(self._calls[name], limit_s)
            if answers[name] == "waits":
                break
        return answers

    def _capture(self) -> None:
        stream = new_stream()
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            self._rows.add_(1)
            self._graph.capture_end()
            self._graph.replay()

    def _free(self) -> None:
        self._page = torch.empty(0)
        torch.cuda.empty_cache()

    def _within(self, call: Callable[[], object], limit_s: float) -> str:
        outcomes = []

        def run() -> None:
            begun = time.perf_counter()
            try:
                torch.cuda.set_device(self._device)
                with torch.cuda.stream(new_stream()):
                    call()
            except RuntimeError as error:
                outcomes.append(f"failed: {str(error).splitlines()[0]}")
            else:
                outcomes.append(f"returned after {1e3 * (time.perf_counter() - begun):.2f} ms")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(limit_s)
        return outcomes[0] if outcomes else "waits"
