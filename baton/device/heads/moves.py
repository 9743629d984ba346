"""Moves between whole blocks, in memory of a worker's first device, and the heads of them that each of its
devices has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.device.heads.table import HEADER_WORDS
from baton.model_spec.head_runs import HeadRun, head_runs
from baton.model_spec.layout import CacheGroup

WORD_BYTES = 4
_ALIGNED_BYTES = 16


class HeadMoves:
    """The blocks of one cache group on several devices. `address`: of the first one's pool. `runs`: of a
    block, int64 [n, RUN_WORDS] on the first device; `longest`: words of the longest."""

    def __init__(self, group: CacheGroup, pools: Sequence[Tensor]) -> None:
        """`group`: with all heads. `pools`: of each rank, uint8 [blocks, bytes of its block], contiguous;
        kernels of the first one's device reach the others. ValueError where heads are not whole words."""
        runs = head_runs(group, len(pools))
        if odd := next((run for run in runs if (run.place | run.whole | run.length) % WORD_BYTES), None):
            raise ValueError(f"heads of {odd.length} bytes in a block are not whole words of {WORD_BYTES}")
        self.block_bytes = group.block_bytes
        self.address = pools[0].data_ptr()
        self.device = pools[0].device
        self.longest = max(run.length for run in runs) // WORD_BYTES
        sizes = [pool.shape[1] for pool in pools]
        places = [pool.data_ptr() - self.address for pool in pools]
        numbers = (*places, *sizes, *(number for run in runs for number in run[1:]))
        self._aligned = self.address % _ALIGNED_BYTES == 0 and not any(n % _ALIGNED_BYTES for n in numbers)
        self._strides = [size // WORD_BYTES for size in sizes]
        self._pools = [pool.view(-1).view(torch.int32) for pool in pools]
        # By words, as those of the kernel.
        self._runs = [HeadRun(run.rank, *(number // WORD_BYTES for number in run[1:])) for run in runs]
        rows = [
            (0, 0, run.whole, run.length)
            if run.rank is None
            else (places[run.rank] + run.place, sizes[run.rank], run.whole, run.length)
            for run in runs
        ]
        self.runs = (torch.tensor(rows, dtype=torch.int64) // WORD_BYTES).to(self.device)

    @property
    def pool(self) -> Tensor:
        """The words of the first device's blocks, flat int32."""
        return self._pools[0]

    @property
    def words(self) -> int:
        """Words of a whole block."""
        return self.block_bytes // WORD_BYTES

    def covering(self, offset: int, length: int) -> range:
        """The words around bytes of a block with which a move may begin and end."""
        step = _ALIGNED_BYTES if self._aligned else WORD_BYTES
        words = step // WORD_BYTES
        return range(offset // step * words, -(-(offset + length) // step) * words)

    def aligned(self, *sizes: int) -> bool:
        """True if all runs, and pieces of these bytes, begin and end at multiples of 16 bytes."""
        return self._aligned and not any(size % _ALIGNED_BYTES for size in sizes)

    def move(self, whole: Tensor, table: Tensor, *, gathers: bool) -> None:
        """Runs a move on a CPU. whole: the words of whole blocks, flat int32; table: as `write_table` makes
        it. `gathers`: into `whole`, padding as zeros; else out of it."""
        blocks, begin, end = table[:3].tolist()
        for block, there in table[HEADER_WORDS:].view(-1, 2)[:blocks].tolist():
            for rank, place, at, length in self._runs:
                low, high = max(at, begin), min(at + length, end)
                if low >= high:
                    continue
                mine = whole[there + low - begin : there + high - begin]
                if rank is None:
                    if gathers:
                        mine.zero_()
                    continue
                pool = self._pools[rank]
                first = block * self._strides[rank] + place + low - at
                theirs = pool[first : first + high - low]
                if gathers:
                    mine.copy_(theirs)
                else:
                    theirs.copy_(mine)
