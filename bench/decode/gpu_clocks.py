"""The ring of clocks on a GPU, copied in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.decode.clocks import ClockSource, Lines

if TYPE_CHECKING:
    import torch

    from baton.engine.executor.decode_loop import DecodeLoop


class _Copying:
    def __init__(self, here: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self._here = here
        self._event = event

    def ended(self) -> Lines | None:
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return None
        lines: Lines = self._here.numpy().copy()
        return lines


class GpuClocks:
    """`ClockSource` over `GraphStep.clocks`; on a CPU, where the interpreter writes them, a plain copy."""

    def __init__(self, clocks: torch.Tensor) -> None:
        import torch

        self.count = clocks.shape[0]
        self._clocks = clocks
        on_gpu = clocks.device.type == "cuda"
        self._here = torch.empty(clocks.shape, dtype=clocks.dtype, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]

    def copy(self) -> _Copying:
        import torch

        if self._stream is None:
            self._here.copy_(self._clocks)
            return _Copying(self._here, None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._here.copy_(self._clocks, non_blocking=True)
            event.record(self._stream)
        return _Copying(self._here, event)


def clock_source(loop: DecodeLoop) -> ClockSource | None:
    """The source; None for the loop in plain torch, which has no clocks."""
    step = getattr(loop, "step_state", None)
    return None if step is None else GpuClocks(step.clocks)
