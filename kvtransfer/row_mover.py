"""`move_rows` from one place to another, again and again: on a GPU the kernel is found once, and its launch
costs the host five microseconds instead of fifty."""

from __future__ import annotations

from torch import Tensor

from baton.device.link_device import Line
from kvtransfer.moving import Travels, move_rows
from kvtransfer.row_table import ROW_BYTES


class RowMover:
    """Between two tensors of `words_of`, by the rows of `table`: int64 [n, ROW_WORDS] on their device."""

    def __init__(
        self, source: Tensor, destination: Tensor, table: Tensor, travels: Travels, *, aligned: bool
    ) -> None:
        """Compiles the kernel where it has not been. `aligned`: as `move_rows`'."""
        self._tensors = source, destination, table
        self._addresses = source.data_ptr(), destination.data_ptr(), table.data_ptr()
        self._travels = travels
        self._aligned = aligned
        self._on_gpu = source.is_cuda
        if self._on_gpu:
            from kvtransfer.gpu.move_runs import WORDS, prepared

            self._words = WORDS
            self._kernel = prepared(source.device, travels is Travels.SOURCE, aligned)

    def move(self, line: Line, first: int, count: int, longest: int) -> None:
        """Says on a line that these rows are to be moved; `longest` of them in words."""
        source, destination, table = self._tensors
        if not self._on_gpu:
            rows = table[first : first + count]
            line.run(
                lambda: move_rows(source, destination, rows, longest, self._travels, aligned=self._aligned)
            )
            return
        begins, goes_to, rows_at = self._addresses
        rows_at += first * ROW_BYTES
        line.launch(self._kernel, (count, -(-longest // self._words)), (begins, goes_to, rows_at, rows_at))
