"""Settings that the processes of guided decoding read from standard input at their start."""

from __future__ import annotations

from baton.engine.shared_memory.layout import SharedRings
from services.common.config.types import StrictModel

# The niceness at which grammars are compiled, so that masks are computed first; and of one that takes long.
NICE = 1
LONG_NICE = 5
# Bytes of stack in which a grammar must compile. Mask processes, which compile it again, have twice as much.
STACK_BYTES = 8 << 20

SlotKey = tuple[int, int]
"""(slot, generation), as the output ring identifies a sequence."""


class CompilerLaunch(StrictModel):
    """Settings of the compile process: the model's folder and the descriptor of its socket."""

    folder: str
    channel_fd: int


class MasksLaunch(CompilerLaunch):
    """Settings of a mask process: vocabulary, sizes and descriptors of the rings and the mask board.
    `memory_mb` bounds the process's address space; `process` is its number among the worker's."""

    vocab_size: int
    sizes: SharedRings
    rings_fd: int
    board_fd: int
    memory_mb: int
    process: int
