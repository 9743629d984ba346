"""Enqueues moves between whole blocks and the heads of a worker's devices, on a stream of the first one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.device.heads.moves import HeadMoves
from baton.device.heads.table import table_words, write_table

# Moves that are enqueued at once at most; a further one waits for the first of them.
_TABLES = 64


class MoveQueue:
    """Moves that run in the order in which they are enqueued; on a CPU each is done when it is. Neither
    allocates memory of a device nor waits for one, as long as fewer than 64 moves are pending. Not
    thread-safe."""

    def __init__(self, device: torch.device, most_blocks: int) -> None:
        """`most_blocks`: of a move."""
        on_gpu = device.type == "cuda"
        count = _TABLES if on_gpu else 1
        self._tables = torch.zeros(count, table_words(most_blocks), dtype=torch.int64, pin_memory=on_gpu)
        self._bytes = self._tables.numpy().data.cast("B")
        self._next = 0
        self._stream: torch.cuda.Stream | None = None
        if on_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._ended = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Makes the queue's stream torch's current one: behind what was enqueued on the current one, and
        before what will be."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def synchronize(self) -> None:
        """Blocks until all enqueued moves have ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def move(
        self, heads: HeadMoves, whole: Tensor, blocks: Sequence[int], words: range, *, gathers: bool
    ) -> None:
        """Enqueues a move of these words of each block, one block behind another in `whole`, uint8 on the
        first device; while `ordered`. `gathers`: into `whole`, else out of it."""
        number, self._next = self._next, (self._next + 1) % len(self._tables)
        if self._stream is not None:
            self._ended[number].synchronize()  # the move that has the table
        table, places = self._tables[number], range(0, len(blocks) * len(words), len(words))
        write_table(self._bytes, number * table.nbytes, blocks, words, places, len(heads.runs))
        if self._stream is None:
            heads.move(whole.view(torch.int32), table, gathers=gathers)
            return
        from baton.device.heads.launch import launch_heads

        launch_heads(heads, whole, table, len(blocks), gathers=gathers, stream=self._stream.cuda_stream)
        self._ended[number].record(self._stream)
