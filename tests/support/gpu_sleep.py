"""Kernels that keep a GPU's stream waiting."""

from __future__ import annotations

import torch


def sleep_on_stream(cycles: int) -> None:
    """Enqueues a kernel on torch's current stream that does nothing for `cycles` cycles of the GPU's
    clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
