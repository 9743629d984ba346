"""The engine's heartbeat: two words of shared memory that its loop writes and its front reads. Torch-free.

    word 0   turns: grows whenever the loop makes progress, between the layers of a step on the host too
    word 1   nanoseconds that the current step is predicted to take

One writer, one reader, another process. Each word is written by one aligned store of 8 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from baton.device.shared_memory import SharedMemory

HEARTBEAT_BYTES = 64
# A step of unknown duration may take as long as ten of these before the engine counts as hung.
UNKNOWN_STEP_S = 6.0


class Beat(NamedTuple):
    """The values that the engine wrote last. `expected_step_s`: predicted duration of the current step,
    seconds."""

    turns: int
    expected_step_s: float


class Heartbeat:
    """The heartbeat of an engine, at either end; only the engine calls `beat`."""

    def __init__(self, memory: SharedMemory, offset: int) -> None:
        """`offset`: bytes at which `HEARTBEAT_BYTES` of `memory` are the heartbeat's."""
        self._words = memory.region(offset, HEARTBEAT_BYTES // 8, np.uint64)

    def beat(self, expected_step_s: float) -> None:
        """Records progress, before work that should take at most `expected_step_s` seconds."""
        self._words[1] = int(expected_step_s * 1e9)
        self._words[0] += np.uint64(1)

    def read(self) -> Beat:
        """The latest beat; `turns` is 0 before the first."""
        return Beat(int(self._words[0]), int(self._words[1]) / 1e9)
