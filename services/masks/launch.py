"""What a mask process reads from standard input at its start."""

from __future__ import annotations

from services.common.config.types import StrictModel

SlotKey = tuple[int, int]
"""(slot, generation), as the output ring identifies a sequence."""


class MasksLaunch(StrictModel):
    """The model's folder and vocabulary, and sizes and descriptors of the shared memory. `memory_mb`
    bounds the process's address space; `process` is its number among the worker's."""

    folder: str
    vocab_size: int
    slots: int
    max_logprobs: int
    channel_fd: int
    rings_fd: int
    board_fd: int
    memory_mb: int
    process: int
